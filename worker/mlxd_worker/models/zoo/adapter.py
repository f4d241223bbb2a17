"""Models that mlxd has no architecture of its own for: mlx-lm's, over our caches.

Invariants:
- Imported when a config first needs it, in the one version that it was held to; its module is one
  of `ZOO_TYPES`, and code that a checkpoint brings along is never run.
- What a model remembers is seen in passes over a hollow model, which evaluate nothing: sizes are
  exact before a weight is read. The same holds for names and shapes of weights.
- `forward` returns logits for hidden rows: the peer's models keep their heads to themselves. Rows
  that nobody asks for are never evaluated.
- Rows decode together where that gives what they give alone, which is tried once a load, and
  nothing is known against it (`APART`); else one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, cast

import mlx.core as mx

from mlxd_models.families.common.family import Family, Footprint
from mlxd_models.families.common.packing import BYTE_DTYPE, WORD_DTYPE, Packings
from mlxd_models.families.common.tensors import TensorSpec
from mlxd_models.families.foreign import FOREIGN, parse_installed
from mlxd_models.families.foreign_tensors import no_tensors
from mlxd_models.files.weights import TensorFact
from mlxd_models.sizes.cache_sizes import CacheSizes, WindowedLayers
from mlxd_models.sizes.zoo_sizes import zoo_context, zoo_pass_sizes
from mlxd_shared.domain.requests import KVFormat
from mlxd_worker.cache.arenas.plan import PassCaches
from mlxd_worker.cache.base import LayerCache, RowId
from mlxd_worker.cache.layers.kinds import AttentionGeometry
from mlxd_worker.cache.layers.recurrent import RecurrentCache
from mlxd_worker.cache.rows import RowCaches
from mlxd_worker.models.base import Batch, Capabilities, Model, plan_pass
from mlxd_worker.models.weights.lazy_tensors import LazyTensors
from mlxd_worker.models.weights.reader import Reader
from mlxd_worker.models.zoo.caches import (
    KeysLeaf,
    Leaves,
    Part,
    PeerCaches,
    StatesLeaf,
    join_parts,
    parts_of,
    recurrent,
)
from mlxd_worker.models.zoo.peer import (
    Say,
    arrays_of,
    cast_weights,
    hollow,
    module_of,
    observe_pass,
    packed_modules,
    parameters_of,
    restore_model,
    unpack,
    without_compiling,
)

if TYPE_CHECKING:  # see `peer`
    from mlx.nn.layers.base import Module

TRIED_LENGTHS: Final = (5, 3)
"""Tokens of the rows that are decoded together, and alone, to see whether it is the same."""

APART: Final = frozenset({"minimax_m3_vl"})
"""Types whose rows never decode together: they choose keys by where these stand among what is
fetched, not by a row's position, and short rows, as they are tried, have all keys chosen."""

TRIED_CONTEXT: Final = 256
APART_ERROR: Final = {mx.float32: 1e-2}
"""How far logits of rows together may be from those of rows alone, relative to the largest."""

APART_ERROR_HALVES: Final = 1e-1


@dataclass(frozen=True)
class ZooConfig:
    """One config, and what a hollow model of it showed."""

    name: str
    """mlx-lm's module."""
    values: Mapping[str, Any]
    packings: Packings | None
    leaves: Leaves
    vocab: int

    @cached_property
    def context_max(self) -> int:
        """The most tokens a row may hold."""
        return zoo_context(self.values)

    def within(self, context: int) -> ZooConfig:
        """Return the config of a model no row of which is ever longer: mlx-lm's knows of none."""
        del context
        return self


class ZooModel:
    """A loaded model of mlx-lm's. One owner: the engine thread."""

    def __init__(
        self,
        config: ZooConfig,
        peer: Module,
        *,
        caches: PeerCaches | None = None,
        say: Say | None = None,
    ) -> None:
        """Own `peer`, whose weights are evaluated; see what it remembers in their type.

        caches: the library's; None: mlx-lm's. say: see `observe_pass`.
        """
        self._config = config
        self._peer = peer
        # What comes before the head is the peer's own affair, and nothing is known of what its
        # models do while they are traced.
        self.capabilities = Capabilities(embeds=False, compiles=False)
        self._caches = caches or PeerCaches(module_of("cache"))
        self._leaves, logits = observe_pass(peer, self._caches, say)
        self.dtype = logits.dtype
        """What its logits are."""
        assert mx.issubdtype(self.dtype, mx.floating), "logits"
        self.apart = False
        self.apart = config.name in APART or not _decodes_together(self)

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""
        return self._config.vocab

    @property
    def context_max(self) -> int:
        """The most tokens a row may hold."""
        return self._config.context_max

    @property
    def attention(self) -> tuple[AttentionGeometry | None, ...]:
        """Each cache's keys and values; None where it holds states, or nothing."""
        return tuple(
            leaf.geometry if isinstance(leaf, KeysLeaf) else None for leaf in self._leaves.leaves
        )

    def new_caches(
        self, *, kv: KVFormat = KVFormat.MODEL, context_max: int | None = None
    ) -> list[LayerCache | None]:
        """Return empty caches, one for each that the peer's model would have."""
        longest = self.context_max if context_max is None else context_max
        caches: list[LayerCache | None] = []
        for leaf in self._leaves.leaves:
            if isinstance(leaf, StatesLeaf):
                caches.append(RecurrentCache(leaf.states) if leaf.states else None)
            elif leaf.geometry is None:
                caches.append(None)
            else:
                caches.append(leaf.geometry.new_cache(leaf.dtype, kv=kv, context_max=longest))
        return caches

    def forward(self, batch: Batch, caches: PassCaches) -> mx.array:
        """Write the batch's tokens into the caches; return their logits' rows, lazy."""
        plan = plan_pass(batch, caches, self.dtype)
        parts = parts_of(plan, batch, apart=self.apart)
        kept = recurrent(caches.layers)
        before = {number: cache.states(plan) for number, cache in kept.items()}
        after: dict[int, list[list[mx.array]]] = {number: [] for number in kept}
        results = []
        with without_compiling():
            for part in parts:
                dressed = self._caches.dress(self._leaves, caches.layers, part, before)
                results.append(self._say(part, batch, dressed))
                for number, states in self._caches.states_after(self._leaves, dressed).items():
                    after[number].append(states)
        for number, states_of_part in after.items():
            states = [join_parts(parts, each) for each in zip(*states_of_part, strict=True)]
            kept[number].put(plan, states)
        return join_parts(parts, results).reshape(-1, self.vocab_size)

    def _say(self, part: Part, batch: Batch, dressed: list[Any]) -> mx.array:
        """Return the logits of one part of a pass, lazy."""
        del batch
        logits: mx.array = self._peer(part.tokens, cache=dressed)
        return logits

    def logits(self, hidden: mx.array) -> mx.array:
        """Return float32 [M, vocab] of what `forward` returned, lazy."""
        return hidden.astype(mx.float32)

    def parameters(self) -> Mapping[str, mx.array]:
        """Return the weights by name, and the tables that the peer's layers keep."""
        return arrays_of(self._peer)


def parse_zoo(config: Mapping[str, Any]) -> ZooConfig:
    """Return what mlx-lm makes of a config; nothing is evaluated.

    Raises:
        InvalidModel: as `parse_installed`; mlx-lm refuses the config, or a cache has no counterpart
            here.
    """
    stated = parse_installed(config)
    peer = hollow(stated.name, config)
    leaves, logits = observe_pass(peer, PeerCaches(module_of("cache")))
    return ZooConfig(stated.name, config, stated.packings, leaves, logits.shape[-1])


def check_zoo(config: ZooConfig, facts: Sequence[TensorFact]) -> tuple[TensorSpec, ...]:
    """Return what mlx-lm makes of the stored tensors, unread; raises as `restore_model`."""
    lazy = LazyTensors(facts)
    return specs_of(_restore(config, {name: lazy.pop(name) for name in list(lazy)}))


def specs_of(peer: Module) -> tuple[TensorSpec, ...]:
    """Return what a model holds, by its own names."""
    specs = []
    packed = packed_modules(peer)
    for path, array in parameters_of(peer):
        stem, _, part = path.rpartition(".")
        packing = packed.get(stem) if part in ("weight", "scales", "biases") else None
        dtype = {mx.uint32: WORD_DTYPE, mx.uint8: BYTE_DTYPE}.get(array.dtype)
        specs.append(
            TensorSpec(
                path,
                tuple(array.shape),
                packing=packing,
                packed=packing is not None and part == "weight",
                beside=packing is not None and part != "weight",
                dtype=dtype if packing is not None else None,
            )
        )
    return tuple(specs)


def _restore(config: ZooConfig, stored: dict[str, mx.array]) -> Module:
    return restore_model(config.name, config.values, stored, config.packings)


def build(config: ZooConfig, weights: Reader) -> Model:
    """Take all weights; nothing else keeps them. Raises as `restore_model`."""
    peer = _restore(config, weights.take_stored())
    settle(peer, weights, unpack)
    return ZooModel(config, peer)


def settle(peer: Module, weights: Reader, unpack_all: Callable[[Module], None]) -> None:
    """Bring a model's weights into the form of the load, and evaluate them."""
    cast_weights(peer, weights.dtype)
    if not weights.keeps_packed:
        unpack_all(peer)
        cast_weights(peer, weights.dtype)
    weights.evaluate(arrays_of(peer))


def zoo_footprint(config: ZooConfig) -> Footprint:
    """Return what is remembered, as it was seen, and the widths that the config states."""
    keys = [leaf.geometry for leaf in config.leaves.leaves if isinstance(leaf, KeysLeaf)]
    kept = [geometry for geometry in keys if geometry is not None]
    windows: dict[int, int] = {}
    whole = 0
    for geometry in kept:
        values = geometry.kv_heads * (geometry.head_dim + (geometry.value_dim or 0))
        if geometry.window is None or geometry.window >= config.context_max:
            whole += values
        else:
            windows[geometry.window] = windows.get(geometry.window, 0) + values
    states = [leaf for leaf in config.leaves.leaves if isinstance(leaf, StatesLeaf) and leaf.states]
    nbytes = sum(RecurrentCache(leaf.states).slot_nbytes(0) for leaf in states)
    caches = CacheSizes(
        kv_values_per_token=whole,
        kv_heads=max((kept_fact.kv_heads for kept_fact in kept), default=1),
        head_dim=max((kept_fact.head_dim for kept_fact in kept), default=1),
        windows=tuple(WindowedLayers(window, windows[window]) for window in sorted(windows)),
        recurrent_values_per_row=-(-nbytes // 4),
        recurrent_layers=len(states),
        foreign=True,
    )
    return Footprint(config.context_max, caches, zoo_pass_sizes(config.values, vocab=config.vocab))


ZOO: Final = Family(
    builder=FOREIGN.builder,
    parse=parse_zoo,
    tensors=no_tensors,
    footprint=zoo_footprint,
    restore=check_zoo,
)


def _decodes_together(model: ZooModel) -> bool:
    """Tell whether rows of unlike lengths give in one pass what they give alone."""
    together = _try_batch(model)
    model.apart = True
    alone = _try_batch(model)
    model.apart = False
    if together is None or alone is None:
        return False
    largest = mx.max(mx.abs(alone))
    error = cast("float", (mx.max(mx.abs(together - alone)) / largest).item())
    return error <= APART_ERROR.get(model.dtype, APART_ERROR_HALVES) or largest.item() == 0


def _try_batch(model: ZooModel) -> mx.array | None:
    """Return the logits of rows that decode in one batch; None where that cannot be done."""
    context = min(TRIED_CONTEXT, model.context_max)
    rows = [RowId(-1 - index) for index in range(len(TRIED_LENGTHS))]
    layers = model.new_caches(context_max=context)
    caches = RowCaches(layers, context_max=context, rows_max=len(rows))
    for row, length in zip(rows, TRIED_LENGTHS, strict=True):
        caches.join(row, tokens=length + 1, coming=len(rows))
        tokens = [(7 * index + 1) % model.vocab_size for index in range(length)]
        model.forward(Batch.prefill(tokens, 0, row), caches)
        mx.eval(caches.state())
    batch = Batch.decode([1 % model.vocab_size] * len(rows), TRIED_LENGTHS, rows)
    try:
        logits = model.logits(model.forward(batch, caches))
        mx.eval(logits, caches.state())
    except (TypeError, ValueError, AttributeError, IndexError):
        return None
    return logits
