"""A resident model that remembers: its account, what a shrink and an unload give back, counts."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlxd_shared.domain.errors import ModelUnloaded
from mlxd_shared.domain.formats import FormatKind, ResponseFormat
from mlxd_shared.domain.requests import LoadSpec
from mlxd_shared.ops.backends import choose_backend, installed_versions
from mlxd_worker.engine.request import StreamId, Submit
from mlxd_worker.servicers.metrics import prefix_counters
from mlxd_worker.thread.facts import Figures, Loaded, LoadJob, PrefixFigures
from mlxd_worker.thread.host import ModelHost
from tests.support.engines import GREEDY, Collected
from tests.support.mlx_memory import live_nbytes
from tests.support.remembering import tokens_of
from tests.support.tiny_model import write_tiny_model

MIB = 1 << 20
POOLED = 4 * MIB


@dataclass(slots=True)
class Hosted:
    """A host, its model's folder, and short ways to use them."""

    host: ModelHost
    folder: Path
    streams: int = 0

    def load(self, **options: Any) -> Loaded:
        """Load the model; return what is known of it."""
        spec = LoadSpec(rows_max=2, **options)
        return self.host.load(LoadJob(self.folder, "tiny", "d" * 64, spec), lambda _: None)

    def submit(self, prompt: tuple[int, ...], *, max_tokens: int = 8) -> Collected:
        """Submit a greedy stream."""
        self.streams += 1
        sink = Collected()
        self.host.submit(
            Submit(
                stream=StreamId(self.streams),
                prompt=prompt,
                sampling=GREEDY,
                max_tokens=max_tokens,
                stop=(),
                stop_token_ids=frozenset(),
                eos_ids=frozenset(),
                skip_special_tokens=True,
                submitted_s=0.0,
                sink=sink,
            )
        )
        return sink

    def ask(self, prompt: tuple[int, ...], *, max_tokens: int = 8) -> Collected:
        """Run a greedy stream to its end."""
        sink = self.submit(prompt, max_tokens=max_tokens)
        while not sink.ended:
            self.host.step()
        return sink


@pytest.fixture
def hosted(tmp_path: Path) -> Iterator[Hosted]:
    """A host on this thread, and a tiny model that it may load; MLX's own limits are put back."""
    limit = mx.set_cache_limit(1 << 40)
    mx.set_cache_limit(limit)
    kind = choose_backend(installed_versions(), platform=sys.platform).kind
    live_nbytes()  # what others left behind is not freed while bytes are compared
    host = ModelHost(device=kind)
    yield Hosted(host, write_tiny_model(tmp_path))
    host.unload(ModelUnloaded("tiny"))
    mx.set_cache_limit(limit)


def accounts_of(figures: Figures) -> dict[str, int]:
    """Return the bytes of each account."""
    return {account.name: account.nbytes for account in figures.accounts}


def test_what_is_kept_has_an_account(hosted: Hosted) -> None:
    """Snapshots are `prefix`, counted while idle, and nothing else stays."""
    others_nbytes = live_nbytes()
    hosted.load()
    assert accounts_of(hosted.host.settle())["prefix"] == 0
    hosted.ask(tokens_of(1, 100))

    assert accounts_of(hosted.host.settle())["kv"] > 0, "an arena is kept for the next stream"
    hosted.host.rest()
    figures = hosted.host.settle()
    # 99 + 8 tokens, 2 layers, keys and values of 2 heads with 8 values of 4 bytes
    assert accounts_of(figures)["prefix"] == 107 * 2 * 2 * 2 * 8 * 4
    assert (accounts_of(figures)["kv"], figures.prefix_snapshots) == (0, 1)
    assert abs(figures.unaccounted_nbytes - others_nbytes) <= 64 << 10


def test_a_rest_leaves_mlxs_pool_empty(hosted: Hosted) -> None:
    """What was freed is kept for the next stream, and goes when none comes."""
    hosted.load()
    mx.eval(mx.zeros(POOLED // 4))
    assert mx.get_cache_memory() >= POOLED

    hosted.host.rest()
    assert mx.get_cache_memory() == 0


def test_a_rest_leaves_no_format_compiled(hosted: Hosted) -> None:
    """What a format's rows have met is in no account, and grows with each of them."""
    constraints = hosted.load().constraints
    wanted = ResponseFormat(FormatKind.JSON_OBJECT)
    constraints.compile(wanted)
    assert constraints.find_kept(wanted) is not None

    hosted.host.rest()
    assert constraints.find_kept(wanted) is None


def test_a_shrink_takes_spare_arenas_before_snapshots(hosted: Hosted) -> None:
    """What is kept for streams to come goes before what their prompts may begin with."""
    hosted.load()
    hosted.ask(tokens_of(1, 100))
    before = accounts_of(hosted.host.settle())
    assert before["kv"] > 0

    hosted.host.shrink(mx.get_active_memory() - before["kv"] // 2)

    after = accounts_of(hosted.host.figures())
    assert (after["kv"], after["prefix"]) == (0, before["prefix"])


def test_a_shrink_takes_the_pool_before_snapshots(hosted: Hosted) -> None:
    """While MLX's pool is enough, nothing that was kept is lost; beyond it, no more than needed."""
    hosted.load()
    for seed in range(4):
        hosted.ask(tokens_of(seed, 100))
    hosted.host.rest()
    kept = accounts_of(hosted.host.figures())["prefix"]
    mx.eval(mx.zeros(POOLED // 4))
    active_nbytes = mx.get_active_memory()
    assert mx.get_cache_memory() >= POOLED

    before, after = hosted.host.shrink(active_nbytes)
    assert before >= active_nbytes + POOLED
    assert after <= active_nbytes
    assert accounts_of(hosted.host.figures())["prefix"] == kept

    _, after = hosted.host.shrink(active_nbytes - kept // 2)
    assert after <= active_nbytes - kept // 2
    left = accounts_of(hosted.host.figures())["prefix"]
    assert kept // 4 <= left <= kept // 2


def test_a_shrink_to_nothing_leaves_the_weights_alone(hosted: Hosted) -> None:
    """Without a stream kv, prefix, draft and workspace are then 0, and the next prompt is new."""
    hosted.load()
    cold = hosted.ask(tokens_of(1, 100))
    hosted.host.shrink(0)

    accounts = accounts_of(hosted.host.settle())
    assert accounts.pop("weights") > 0
    assert set(accounts.values()) == {0}
    again = hosted.ask(tokens_of(1, 100))
    assert again.finished.usage.cached_tokens == 0
    assert again.finished.usage.cache_reason == "evicted"
    assert again.ids == cold.ids


def test_a_shrink_beside_a_stream_does_not_disturb_it(hosted: Hosted) -> None:
    """What a running row was restored from may go: it has its own copy."""
    hosted.load()
    cold = hosted.ask(tokens_of(1, 100), max_tokens=40)
    sink = hosted.submit(tokens_of(1, 100), max_tokens=40)
    while not sink.events:
        hosted.host.step()
    hosted.host.shrink(0)
    assert accounts_of(hosted.host.figures())["prefix"] == 0
    while not sink.ended:
        hosted.host.step()
    assert sink.ids == cold.ids
    assert sink.finished.usage.cached_tokens == 99


def test_an_unload_gives_everything_back(hosted: Hosted) -> None:
    """Snapshots go with the model, those of running rows too, without being copied out first."""
    before = live_nbytes()
    hosted.load()
    hosted.ask(tokens_of(1, 100))
    running = hosted.submit(tokens_of(2, 100), max_tokens=100)
    while not running.events:
        hosted.host.step()

    held_nbytes = mx.get_active_memory()
    mx.reset_peak_memory()
    after = hosted.host.unload(ModelUnloaded("tiny"))
    assert mx.get_peak_memory() <= held_nbytes, "nothing was made on the way"
    assert abs(after - before) <= 64 << 10
    assert set(accounts_of(hosted.host.settle()).values()) == {0}
    assert hosted.host.figures().prefix_snapshots == 0


def test_a_budget_of_nothing_is_honoured(hosted: Hosted) -> None:
    """The load's own figure rules: 0 keeps nothing."""
    hosted.load(prefix_cache_nbytes=0)
    for _ in range(2):
        assert hosted.ask(tokens_of(1, 100)).finished.usage.cached_tokens == 0
    assert accounts_of(hosted.host.settle())["prefix"] == 0


def test_counts_outlive_the_model(hosted: Hosted) -> None:
    """Look-ups and evictions are counted by model from the process's start; warm-up is none."""
    hosted.load()
    hosted.ask(tokens_of(1, 100))
    hosted.ask(tokens_of(1, 100))
    hosted.host.shrink(0)
    hosted.host.unload(ModelUnloaded("tiny"))
    hosted.load()
    hosted.ask(tokens_of(1, 100))

    ((model, counts),) = hosted.host.figures().prefixes
    assert model == "tiny"
    assert counts.lookups == (("miss", "none", 2), ("hit", "none", 1))
    assert counts.hit_tokens == 99
    assert counts.evictions > 0
    assert counts.evicted_nbytes == 107 * 256


def test_counts_are_metrics() -> None:
    """Every look-up is one point by model, result and reason."""
    figures_told = PrefixFigures(
        lookups=(("hit", "diverged", 2), ("miss", "none", 3)),
        hit_tokens=50,
        evictions=4,
        evicted_nbytes=1000,
    )
    figures = Figures(at_s=0.0, prefixes=(("tiny", figures_told),))
    points = {
        (counter.name, *(value for _, value in labels)): value
        for counter in prefix_counters(figures)
        for labels, value in counter.points.items()
    }
    assert points == {
        ("mlxd_prefix_lookups_total", "tiny", "diverged", "hit"): 2,
        ("mlxd_prefix_lookups_total", "tiny", "none", "miss"): 3,
        ("mlxd_prefix_hit_tokens_total", "tiny"): 50,
        ("mlxd_prefix_disk_hit_tokens_total", "tiny"): 0,
        ("mlxd_prefix_evictions_total", "tiny"): 4,
        ("mlxd_prefix_evicted_bytes_total", "tiny"): 1000,
    }
