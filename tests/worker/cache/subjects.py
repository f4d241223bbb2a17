"""Layers under test: how each is driven, and what it must give, told from a row's whole history.

A history is the list of a row's tags, one a token, each given out once. What a layer is fed for a
token tells the tag, its position and the layer, so that a wrong token, or the right one at a wrong
place, gives other numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Protocol

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from mlxd_models.sizes.cache_sizes import KV_GROUP_VALUES
from mlxd_shared.domain.requests import KVFormat
from mlxd_worker.cache.arenas.plan import StepPlan
from mlxd_worker.cache.base import Kind, LayerCache
from mlxd_worker.cache.layers.attention import Asked
from mlxd_worker.cache.layers.kinds import AttentionCache
from mlxd_worker.cache.layers.kv import KVCache
from mlxd_worker.cache.layers.latent import LatentCache
from mlxd_worker.cache.layers.quantized import Packing, QuantizedKVCache
from mlxd_worker.cache.layers.recurrent import RecurrentCache, RowState
from mlxd_worker.cache.layers.rotating import RotatingCache

Array = npt.NDArray[np.float32]
Tags = Sequence[int]

KV_HEADS, HEADS = 2, 4
TAGS = 4093
"""Tags that differ in what they feed: more than a program gives out to rows alive together."""

DECAY = 0.99
TAIL = 3


@cache
def _phases(layer: int, part: int, width: int) -> Array:
    draws = np.random.default_rng([layer, part, width])
    return draws.uniform(0, 2 * np.pi, (KV_HEADS, TAGS, width)).astype(np.float32)


def entries(tags: Tags, first: int, *, layer: int, part: int, width: int) -> Array:
    """Return what a layer is fed for `tags` at the positions from `first` on: [heads, n, width]."""
    numbers = np.asarray(tags, dtype=np.int64) % TAGS
    positions = np.arange(first, first + len(numbers), dtype=np.float32)
    fed = np.sin(_phases(layer, part, width)[:, numbers] + 0.61 * positions[:, None])
    fed[..., 0] = numbers / TAGS
    fed[..., 1] = positions / TAGS
    return fed


def queries_for(step: int, rows: int, width: int, head_dim: int) -> Array:
    """Return queries [rows, heads, width, head_dim], sharp enough that single tokens count."""
    draws = np.random.default_rng(step)
    return draws.normal(0, 2, (rows, HEADS, width, head_dim)).astype(np.float32)


class Layer(Protocol):
    """One layer of a subject: makes a cache, drives it, and knows what it must hold."""

    @property
    def kind(self) -> Kind:
        """What the cache says it is."""
        ...

    @property
    def window(self) -> int | None:
        """Positions that a query sees; None: all."""
        ...

    def make(self) -> LayerCache:
        """Return an empty cache."""
        ...

    def drive(
        self, cache: LayerCache, plan: StepPlan, step: int, layer: int, fed: Sequence[Fed]
    ) -> mx.array | None:
        """Carry one pass out; return what its queries read, lazy, if it has queries."""
        ...

    def expect(self, step: int, layer: int, fed: Sequence[Fed]) -> list[Array]:
        """Return what each row's queries must have read."""
        ...

    def expect_contents(
        self, layer: int, history: Tags, start: int, stop: int
    ) -> tuple[Array, ...]:
        """Return what `read` of a row of this history must give."""
        ...


@dataclass(frozen=True)
class Fed:
    """One row's part of a pass: its history with the new tokens, and how many these are."""

    history: Tags
    width: int

    @property
    def first(self) -> int:
        """The position of the first new token."""
        return len(self.history) - self.width


def _stored_as_given(keys: Array, values: Array) -> tuple[Array, ...]:
    return keys[None], values[None]


def _seen_as_given(array: Array) -> Array:
    return array


@dataclass(frozen=True)
class Attention:
    """A layer of attention, whatever its cache stores."""

    kind: Kind
    make_cache: Callable[[], AttentionCache]
    head_dim: int = 8
    window: int | None = None
    seen: Callable[[Array], Array] = _seen_as_given
    """What is left of keys or values [heads, n, width] once they have been stored."""
    stored: Callable[[Array, Array], tuple[Array, ...]] = _stored_as_given
    """The arrays [1, heads, n, width] in which keys and values are stored."""

    def make(self) -> AttentionCache:
        """Return an empty cache."""
        return self.make_cache()

    def drive(
        self, cache: LayerCache, plan: StepPlan, step: int, layer: int, fed: Sequence[Fed]
    ) -> mx.array | None:
        """Write each row's new keys and values and let its queries read."""
        queries = queries_for(step, len(fed), fed[0].width, self.head_dim)
        keys, values = (
            np.stack([self._feed(layer, part, row.history, row.first) for row in fed])
            for part in (0, 1)
        )
        attention: AttentionCache = cache  # type: ignore[assignment]  # it is what `make` gave
        return attention.attend(
            Asked(mx.array(queries), mx.array(keys), mx.array(values), plan, self.head_dim**-0.5)
        )

    def expect(self, step: int, layer: int, fed: Sequence[Fed]) -> list[Array]:
        """Return attention over the whole history, window or not, in float64."""
        queries = queries_for(step, len(fed), fed[0].width, self.head_dim)
        return [self._attend(layer, row, queries[index]) for index, row in enumerate(fed)]

    def expect_contents(
        self, layer: int, history: Tags, start: int, stop: int
    ) -> tuple[Array, ...]:
        """Return the stored keys, then the stored values, of what the kind remembers."""
        first = start if self.window is None else max(stop - self.window, 0)
        return self.stored(*(self._feed(layer, part, history[:stop], first) for part in (0, 1)))

    def _feed(self, layer: int, part: int, history: Tags, first: int) -> Array:
        return entries(history[first:], first, layer=layer, part=part, width=self.head_dim)

    def _attend(self, layer: int, row: Fed, queries: Array) -> Array:
        length = len(row.history)
        keys, values = (
            np.repeat(self.seen(self._feed(layer, part, row.history, 0)), HEADS // KV_HEADS, axis=0)
            for part in (0, 1)
        )
        scores = queries.astype(np.float64) @ keys.transpose(0, 2, 1) * self.head_dim**-0.5
        asking = row.first + np.arange(row.width)[:, None]
        positions = np.arange(length)
        hidden = positions > asking
        if self.window is not None:
            hidden |= positions <= asking - self.window
        weights = np.exp(np.where(hidden, -np.inf, scores))
        weights /= weights.sum(axis=-1, keepdims=True)
        return (weights @ values).astype(np.float32)


@dataclass(frozen=True)
class Latents:
    """A layer of latents: one entry a position, of which queries read the first values."""

    entry_dim: int = 8
    latent_dim: int = 5

    @property
    def kind(self) -> Kind:
        """LATENT."""
        return Kind.LATENT

    @property
    def window(self) -> int | None:
        """All positions are seen."""
        return None

    def make(self) -> LayerCache:
        """Return an empty cache."""
        return LatentCache(entry_dim=self.entry_dim, latent_dim=self.latent_dim, dtype=mx.float32)

    def drive(
        self, cache: LayerCache, plan: StepPlan, step: int, layer: int, fed: Sequence[Fed]
    ) -> mx.array | None:
        """Write each row's new entries and let its queries read."""
        assert isinstance(cache, LatentCache)
        queries = queries_for(step, len(fed), fed[0].width, self.entry_dim)
        entries_of_rows = np.stack([self._feed(layer, row.history, row.first) for row in fed])
        return cache.attend(
            mx.array(queries), mx.array(entries_of_rows), plan, scale=self.entry_dim**-0.5
        )

    def expect(self, step: int, layer: int, fed: Sequence[Fed]) -> list[Array]:
        """Return attention over the whole history, in float64."""
        queries = queries_for(step, len(fed), fed[0].width, self.entry_dim)
        return [self._attend(layer, row, queries[index]) for index, row in enumerate(fed)]

    def expect_contents(
        self, layer: int, history: Tags, start: int, stop: int
    ) -> tuple[Array, ...]:
        """Return the stored entries."""
        return (self._feed(layer, history[:stop], start)[None],)

    def _feed(self, layer: int, history: Tags, first: int) -> Array:
        return entries(history[first:], first, layer=layer, part=0, width=self.entry_dim)[:1]

    def _attend(self, layer: int, row: Fed, queries: Array) -> Array:
        entries_of_row = self._feed(layer, row.history, 0)[0].astype(np.float64)
        scores = queries.astype(np.float64) @ entries_of_row.T * self.entry_dim**-0.5
        hidden = np.arange(len(row.history)) > row.first + np.arange(row.width)[:, None]
        weights = np.exp(np.where(hidden, -np.inf, scores))
        weights /= weights.sum(axis=-1, keepdims=True)
        read: Array = (weights @ entries_of_row[:, : self.latent_dim]).astype(np.float32)
        return read


@dataclass(frozen=True)
class Recurrent:
    """A recurrent layer: the last inputs, and a sum of outer products that fades."""

    width: int = 6

    @property
    def kind(self) -> Kind:
        """RECURRENT."""
        return Kind.RECURRENT

    @property
    def window(self) -> int | None:
        """Nothing: it has no positions."""
        return None

    def make(self) -> LayerCache:
        """Return an empty cache of a convolution's tail and a recurrence."""
        return RecurrentCache(
            [
                RowState("tail", (TAIL, self.width), mx.float32),
                RowState("sum", (self.width, self.width), mx.float32),
            ]
        )

    def drive(
        self, cache: LayerCache, plan: StepPlan, step: int, layer: int, fed: Sequence[Fed]
    ) -> mx.array | None:
        """Fold each row's new tokens into its states."""
        assert isinstance(cache, RecurrentCache)
        tails, sums = cache.states(plan)
        width = fed[0].width
        inputs = mx.array(np.stack([self._feed(layer, row.history)[row.first :] for row in fed]))
        faded = mx.array(DECAY ** np.arange(width - 1, -1, -1.0).astype(np.float32))
        added = (inputs * faded[:, None]).transpose(0, 2, 1) @ mx.concatenate(
            [inputs[..., -1:], inputs[..., :-1]], axis=2
        )
        tails = mx.concatenate([tails, inputs], axis=1)[:, -TAIL:]
        cache.put(plan, [tails, sums * DECAY**width + added])
        return None

    def expect(self, step: int, layer: int, fed: Sequence[Fed]) -> list[Array]:
        """Return nothing: no query reads; the states are compared as contents."""
        return []

    def expect_contents(
        self, layer: int, history: Tags, start: int, stop: int
    ) -> tuple[Array, ...]:
        """Return the fold over the whole history up to `stop`."""
        inputs = self._feed(layer, history[:stop]).astype(np.float64)
        tail = np.concatenate([np.zeros((TAIL, self.width)), inputs])[-TAIL:]
        faded = DECAY ** np.arange(len(inputs) - 1, -1, -1.0)
        total = (inputs * faded[:, None]).T @ np.roll(inputs, 1, axis=1)
        return tail[None].astype(np.float32), total[None].astype(np.float32)

    def _feed(self, layer: int, history: Tags) -> Array:
        one_head: Array = entries(history, 0, layer=layer, part=0, width=self.width)[0]
        return one_head


@dataclass(frozen=True)
class Subject:
    """A model's layers, None for a stateless one."""

    name: str
    layers: tuple[Layer | None, ...]

    @property
    def stateful(self) -> list[tuple[int, Layer]]:
        """The layers with a cache, each with its index."""
        return [(index, layer) for index, layer in enumerate(self.layers) if layer is not None]

    def of(self, kind: Kind) -> list[tuple[int, Layer]]:
        """Return the layers of one kind, each with its index."""
        return [(index, layer) for index, layer in self.stateful if layer.kind is kind]

    @property
    def kinds(self) -> list[Kind]:
        """The kinds that occur, each once."""
        return list(dict.fromkeys(layer.kind for _, layer in self.stateful))


def standard(head_dim: int = 8) -> Attention:
    """Return a layer that remembers every position."""
    return Attention(
        kind=Kind.STANDARD,
        make_cache=lambda: KVCache(kv_heads=KV_HEADS, head_dim=head_dim, dtype=mx.float32),
        head_dim=head_dim,
    )


def rotating(window: int) -> Attention:
    """Return a layer with a sliding window."""
    return Attention(
        kind=Kind.ROTATING,
        make_cache=lambda: RotatingCache(
            kv_heads=KV_HEADS, head_dim=8, window=window, dtype=mx.float32
        ),
        window=window,
    )


def make_quantized(kv: KVFormat) -> Attention:
    """Return a layer that remembers every position in few bits."""
    width = KV_GROUP_VALUES[-1]
    packing = Packing(kv, head_dim=width)

    def see(array: Array) -> Array:
        return np.array(packing.unpack(packing.pack(mx.array(array))))

    def store(keys: Array, values: Array) -> tuple[Array, ...]:
        packed = packing.pack(mx.array(np.concatenate([keys, values])[None]))
        return tuple(np.array(array) for array in packed)

    return Attention(
        kind=Kind.QUANTIZED,
        make_cache=lambda: QuantizedKVCache(
            kv_heads=KV_HEADS, head_dim=width, dtype=mx.float32, kv=kv
        ),
        head_dim=width,
        seen=see,
        stored=store,
    )


SUBJECTS = (
    Subject("standard", (standard(), standard())),
    Subject("rotating", (rotating(48), rotating(48))),
    Subject("rotating-wide", (rotating(300),)),
    Subject("quantized", (make_quantized(KVFormat.Q8), make_quantized(KVFormat.Q4))),
    Subject("latent", (Latents(), Latents(latent_dim=8))),
    Subject("recurrent", (Recurrent(), Recurrent())),
    Subject("mixed", (standard(), None, rotating(48), Recurrent(), None, rotating(300))),
    Subject("hybrid-quantized", (None, Recurrent(), make_quantized(KVFormat.Q8), Recurrent())),
)
