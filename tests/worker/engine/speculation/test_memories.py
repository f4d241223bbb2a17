"""Guessing on every kind of memory: the same tokens, and the same left behind for later prompts.

`Oracle` knows what plain decoding gives, and mistakes a third of it, so that most steps take
several tokens and cut others back.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxd_shared.domain.requests import KVFormat, Sampling
from mlxd_worker.engine.request import Submit
from mlxd_worker.memory.ledger import Account, Ledger
from mlxd_worker.models.base import Model
from mlxd_worker.text.tokenizer import Tokenizer
from mlxd_worker.tokenizing.files import load_tokenizer
from tests.bench.models import Shape
from tests.support.effort import IN_SOAK, examples
from tests.support.engines import GREEDY, Collected, TinyEngine
from tests.support.mlx_memory import live_nbytes
from tests.support.random_model import write_dense_model
from tests.support.remembering import AMPLE, MEMORIES, STRAY_NBYTES, WINDOW, tokens_of
from tests.worker.engine.speculation.guessing import drafter_for, guessing_engine
from tests.worker.tiny import load

SEEDED = Sampling(1.0, 40, 0.95, 0.0, seed=11, repetition_penalty=1.2)
WRONG = 0.3
WIDE_HEADS = Shape(hidden=64, layers=2, heads=2, kv_heads=1, mlp=64, context=512)
"""Of 32 values each, which a group of quantised ones divides."""


@dataclass(slots=True)
class Scene:
    """A model, what plain decoding gives for each prompt, and engines that guess."""

    model: Model
    tokenizer: Tokenizer
    kv: KVFormat = KVFormat.MODEL
    plain: dict[tuple[int, ...], tuple[int, ...]] = field(default_factory=dict)
    known: dict[tuple[Any, ...], Collected] = field(default_factory=dict)

    def engine(self, *, guesses: bool, **options: Any) -> TinyEngine:
        """Return an engine that remembers; `guesses`: whose rows guess, as `plain` knows."""
        return guessing_engine(
            self.model,
            self.tokenizer,
            make_drafter=drafter_for(self.plain, wrong=WRONG),
            depth=15 if guesses else 0,
            kv=self.kv,
            **{"prefix_nbytes": AMPLE, **options},
        )

    def learn(self, prompt: tuple[int, ...], **options: Any) -> Collected:
        """Decode a prompt plainly, with nothing to reuse, and remember what came."""
        key = (prompt, *sorted(options.items(), key=lambda item: item[0]))
        if key not in self.known:
            self.known[key] = self.engine(guesses=False, prefix_nbytes=0).alone(prompt, **options)
        self.plain[prompt] = tuple(self.known[key].ids)
        return self.known[key]


KINDS = [*MEMORIES, "q8"] if IN_SOAK else ["mixed", "hybrid", "q8"]


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    """A kind of memory."""
    return str(request.param)


@pytest.fixture(scope="module")
def scene(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Scene:
    """A tiny model of that kind."""
    folder = tmp_path_factory.mktemp(kind)
    if kind != "q8":
        MEMORIES[kind](folder)
        return Scene(load(folder), load_tokenizer(folder))
    write_dense_model(folder, shape=WIDE_HEADS)
    return Scene(load(folder), load_tokenizer(folder), kv=KVFormat.Q8)


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED])
def test_guessing_changes_neither_tokens_nor_what_is_kept(
    scene: Scene, kind: str, sampling: Sampling
) -> None:
    """Streams of all lengths, before and after a window has come round, then prompts on top."""
    prompts = [tokens_of(seed, length) for seed, length in ((1, 3), (2, 20), (3, 100))]
    options: dict[str, Any] = {"max_tokens": 40, "sampling": sampling}
    plain = [scene.learn(prompt, **options) for prompt in prompts]
    guessing, patient = scene.engine(guesses=True), scene.engine(guesses=False)

    for prompt, expected in zip(prompts, plain, strict=True):
        sink = guessing.alone(prompt, **options)
        assert sink.ids == expected.ids == patient.alone(prompt, **options).ids
        usage = sink.finished.usage
        if kind == "hybrid" or (kind in ("sliding", "mixed") and len(prompt) >= WINDOW):
            assert usage.drafted_tokens == 0, "nothing that could not be taken back is guessed"
        else:
            assert 0 < usage.accepted_draft_tokens < usage.drafted_tokens
        later = (*prompt, *sink.ids, *tokens_of(9, 5))
        assert guessing.prefix.count_known(later) == patient.prefix.count_known(later) > 0
        assert guessing.prefix.nbytes == patient.prefix.nbytes
        # What is kept is sound, too: the next turn's tokens are those of a cold engine.
        cold = scene.engine(guesses=False, prefix_nbytes=0).alone(later, max_tokens=5)
        assert guessing.alone(later, max_tokens=5, speculation_depth=0).ids == cold.ids
        patient.alone(later, max_tokens=5)


@contextmanager
def audit_memory(tiny: TinyEngine) -> Iterator[None]:
    """Assert at the end that the engine holds nothing but what its prefix cache accounts for."""
    tiny.rest()
    gc.collect()
    mx.clear_cache()
    before_nbytes = live_nbytes()
    ledger = Ledger()
    ledger.attach(Account.KV, "rows", tiny.caches)
    contents = tiny.caches.contents
    ledger.attach(Account.PREFIX, "snapshots", contents.book, tally=contents.book.tally)
    yield
    assert not tiny.engine.busy
    tiny.rest()
    reports = {report.name: report.nbytes for report in ledger.report()}
    assert reports[Account.KV] == 0
    assert reports[Account.PREFIX] == contents.book.nbytes == tiny.prefix.nbytes
    gc.collect()
    ledger.sweep()
    stray_nbytes = mx.get_active_memory() - before_nbytes - reports[Account.PREFIX]
    assert abs(stray_nbytes) <= STRAY_NBYTES
    tiny.prefix.shrink(0)
    assert (contents.book.live, contents.book.nbytes, tiny.prefix.nbytes) == (0, 0, 0)


@dataclass(frozen=True, slots=True)
class Job:
    """One stream of a mix."""

    seed: int
    length: int
    max_tokens: int
    sampling: Sampling
    depth: int
    arrives: int
    """At which step."""
    leaves: int | None
    """After how many steps more it is cancelled."""

    @property
    def prompt(self) -> tuple[int, ...]:
        """The prompt; two with one seed begin alike."""
        return tokens_of(self.seed, self.length)


jobs = st.builds(
    Job,
    seed=st.integers(1, 3),
    length=st.sampled_from([1, 2, 5, 17, 40, 65, 240, 250]),
    max_tokens=st.sampled_from([1, 2, 7, 20]),
    sampling=st.sampled_from([GREEDY, SEEDED]),
    depth=st.sampled_from([0, 0, 1, 3, 15]),
    arrives=st.integers(0, 12),
    leaves=st.none() | st.none() | st.integers(0, 12),
)


@settings(max_examples=examples(4))
@given(mix=st.lists(jobs, min_size=1, max_size=7), bounded=st.booleans())
def test_any_mix_gives_each_stream_its_own(scene: Scene, mix: list[Job], bounded: bool) -> None:
    """Rows that guess and rows that do not, that join and are cancelled, bounded shapes or not:
    each gets the tokens of plain decoding alone, and nothing is left of any.
    """
    tiny = scene.engine(guesses=True, rows_max=4, bounded_shapes=bounded)
    alone = [
        scene.learn(job.prompt, max_tokens=job.max_tokens, sampling=job.sampling) for job in mix
    ]
    with audit_memory(tiny):
        together = run_together(tiny, mix)
    for job, sink, expected in zip(mix, together, alone, strict=True):
        if sink.ended:
            assert (sink.ids, sink.reason) == (expected.ids, expected.reason)
        else:
            assert job.leaves is not None
            assert sink.ids == expected.ids[: len(sink.ids)]


def run_together(tiny: TinyEngine, mix: list[Job]) -> list[Collected]:
    """Let each stream come, and go where it does, in steps of one engine; return their sinks."""
    sinks = [Collected() for _ in mix]
    running: dict[int, Submit] = {}
    for step in range(400):
        for index, job in enumerate(mix):
            if job.arrives == step:
                running[index], _ = tiny.submit(
                    job.prompt,
                    sink=sinks[index],
                    max_tokens=job.max_tokens,
                    sampling=job.sampling,
                    speculation_depth=job.depth,
                )
            if job.leaves is not None and step == job.arrives + job.leaves:
                tiny.engine.cancel(running[index].stream)
        tiny.engine.step()
        if len(running) == len(mix) and not tiny.engine.busy:
            return sinks
    raise AssertionError("the streams do not come to an end")
