"""Tiny models of every kind of memory, and engines on them that remember former prompts."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import mlx.core as mx

from mlxd_shared.domain.cache_reasons import CacheReason
from mlxd_worker.memory.ledger import Account, Ledger
from tests.support.engines import Collected, TinyEngine, tiny_engine
from tests.support.mlx_memory import live_nbytes
from tests.support.random_model import (
    TINY,
    write_dense_model,
    write_hybrid_model,
    write_latent_model,
    write_sliding_model,
)
from tests.support.tiny_model import VOCAB

WINDOW = 32
AMPLE = 1 << 30
STRAY_NBYTES = 64 << 10
"""What an idle worker on a CPU may hold beside its accounts."""

MEMORIES: Mapping[str, Callable[[Path], Path]] = MappingProxyType(
    {
        "standard": write_dense_model,
        "sliding": lambda folder: write_sliding_model(folder, window=WINDOW, mixed=False),
        "mixed": lambda folder: write_sliding_model(folder, window=WINDOW, mixed=True),
        "hybrid": lambda folder: write_hybrid_model(folder, shape=TINY),
        "latent": write_latent_model,
    }
)


def tokens_of(seed: int, length: int) -> tuple[int, ...]:
    """Return plain tokens, the same for one seed."""
    draws = random.Random(seed)
    return tuple(draws.randrange(3, VOCAB) for _ in range(length))


@dataclass(frozen=True, slots=True)
class Answer:
    """What one request got, and what it cost."""

    ids: tuple[int, ...]
    total: int
    cached: int
    reason: CacheReason

    @property
    def left(self) -> int:
        """Prompt tokens evaluated."""
        return self.total - self.cached


@dataclass(slots=True)
class Scene:
    """An engine that remembers, one on the same model that does not, and a ledger."""

    tiny: TinyEngine
    cold: TinyEngine
    baseline_nbytes: int
    ledger: Ledger = field(default_factory=Ledger)

    def ask(self, prompt: tuple[int, ...], **options: Any) -> Answer:
        """Run one stream to its end; its tokens are those of an engine without memory."""
        sink = self.tiny.alone(prompt, **options)
        assert sink.ids == self.cold.alone(prompt, **options).ids
        self.audit()
        return answer_of(sink)

    def audit(self) -> None:
        """Assert that every byte has an account, the snapshots' the right one, within budget."""
        contents, prefix = self.tiny.caches.contents, self.tiny.prefix
        reports = {report.name: report.nbytes for report in self.ledger.report()}
        assert reports[Account.PREFIX] == contents.book.nbytes == prefix.nbytes
        assert prefix.nbytes <= prefix.budget_nbytes
        if not self.tiny.engine.busy:
            assert self.tiny.caches.rows == ()
            gc.collect()
            self.ledger.sweep()
            stray_nbytes = mx.get_active_memory() - self.baseline_nbytes - sum(reports.values())
            assert abs(stray_nbytes) <= STRAY_NBYTES


@contextmanager
def remembering(
    folder: Path, *, budget_nbytes: int = AMPLE, chunk: int = 64, **options: Any
) -> Iterator[Scene]:
    """Give a scene on the model in `folder`; at its end nothing may be left open or held."""
    cold = tiny_engine(folder, chunk=chunk, keeps_spares=False, **options)
    tiny = tiny_engine(folder, chunk=chunk, prefix_nbytes=budget_nbytes, **options)
    cold.alone(tokens_of(0, 4))
    scene = Scene(tiny, cold, live_nbytes())
    scene.ledger.attach(Account.KV, "rows", tiny.caches)
    contents = tiny.caches.contents
    scene.ledger.attach(Account.PREFIX, "snapshots", contents.book, tally=contents.book.tally)
    yield scene
    assert not tiny.engine.busy
    scene.audit()
    tiny.rest()
    tiny.prefix.shrink(0)
    assert (tiny.caches.contents.book.live, tiny.prefix.nbytes) == (0, 0)
    scene.audit()


def kept_nbytes(folder: Path, prompt: tuple[int, ...]) -> int:
    """Return what one short answer to `prompt` leaves behind."""
    with remembering(folder) as scene:
        scene.ask(prompt)
        return scene.tiny.prefix.nbytes


def answer_of(sink: Collected) -> Answer:
    """Return what a finished stream got."""
    usage = sink.finished.usage
    return Answer(tuple(sink.ids), usage.prompt_tokens, usage.cached_tokens, usage.cache_reason)
