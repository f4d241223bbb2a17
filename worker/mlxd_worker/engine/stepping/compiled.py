"""A model whose decode step is one compiled function, where that pays: on CUDA, 1.2 to 1.9 times.

Invariants:
- The function takes tokens, positions and the caches' arrays and returns hidden rows and the
  arrays: given away while it is called and evaluated, they are written in place. Where tokens may
  stand elsewhere for rotations (`turns_apart`), it takes where, one number a token.
- It is traced once for each set of arena shapes; rows that join, leave or trade places only change
  what is in its arguments. One arena's shapes are run before READY; sets of several when they are
  first met, at most `STEPS_MAX` of all kept.
- Where caches are written in place, prompts too are read like this while they are short (`tokens`):
  then all passes take one of few numbers of tokens, whoever they are of.
- Everything else, and what does not fit it, is the model's own pass.
- What it is capable of it states itself: nothing that it does not carry out is inherited.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import mlx.core as mx

from mlxd_worker.cache.arenas.plan import PassCaches, StepPlan
from mlxd_worker.cache.base import ArenaId, LayerCache, RowId
from mlxd_worker.cache.layers.slots import ArenaShape, plan_by_slots, slot_caches
from mlxd_worker.cache.layers.store import SliceableCache
from mlxd_worker.cache.layers.tokens import TokenLayout, plan_tokens
from mlxd_worker.cache.rows import RowCaches
from mlxd_worker.models.base import Batch, Model

STEPS_MAX = 160
"""Compiled steps that are kept, the one used longest ago going first."""

Step = Callable[
    [mx.array, mx.array, mx.array, mx.array | None, list[mx.array]],
    tuple[mx.array, list[mx.array]],
]
Plans = Callable[[Sequence[ArenaId], mx.array, mx.array, mx.array | None], StepPlan]
"""Makes the plan of a traced pass, from its arenas' names, its positions, its slots, and where its
tokens stand for rotations; None: at their positions."""
_Key = tuple[tuple[ArenaShape, ...], object]


class CompiledModel:
    """A model and the row caches that its compiled step writes. One owner: the engine thread."""

    def __init__(self, model: Model, caches: RowCaches) -> None:
        """Wrap `model`; passes over other caches than `caches` are its own."""
        self._model = model
        self._caches = caches
        self._layers = slot_caches(caches.layers)
        self._steps: OrderedDict[_Key, Step] = OrderedDict()
        own = model.capabilities
        self.capabilities = replace(
            own,
            stays_lazy=False,  # a step takes the arrays out of the caches when it is called
            joins_passes=False,  # shapes must be few
            overlaps_steps=(caches.standard and self._layers is not None and own.decodes_in_place),
            prompts_in_place=own.flat_tokens_max if caches.in_place else 0,
        )

    @property
    def vocab_size(self) -> int:
        """The model's own."""
        return self._model.vocab_size

    @property
    def steps(self) -> int:
        """How many compiled steps are kept."""
        return len(self._steps)

    def logits(self, hidden: mx.array) -> mx.array:
        """Return the model's own."""
        return self._model.logits(hidden)

    def forward(
        self, batch: Batch, caches: PassCaches, *, lone_row: bool = True, least: int = 1
    ) -> mx.array:
        """Do one pass as the model would, a decode step by the compiled function.

        To warm up: lone_row: whether a single row's pass is its own, or like one of several.
        least: so many flat tokens it is over at least, as a wider one would be.
        """
        if batch.inlays or batch.lasts or self._turns_by_axes(batch):  # in no compiled pass
            return self._model.forward(batch, caches)
        if caches is self._caches and self._caches.in_place:
            counts = batch.counts or (batch.width,) * len(batch.rows)
            by_tokens = self._caches.by_tokens(
                batch.rows,
                batch.lengths,
                counts,
                most=self.capabilities.prompts_in_place,
                least=least,
            )
            if by_tokens is None:
                return self._model.forward(batch, caches)
            return self._pass_tokens(batch, by_tokens)
        slots = None
        one_each = batch.width == 1 and not batch.counts
        if one_each and self._layers is not None and caches is self._caches:
            slots = self._caches.by_slots(batch.rows, batch.lengths, lone_row=lone_row)
        if slots is None or self._layers is None:
            return self._model.forward(batch, caches)
        layout, positions = slots
        tokens = batch.tokens.reshape(-1)
        if layout.source is not None:
            tokens = tokens[layout.source]
        alone = layout.alone is not None
        shapes, dtype = layout.shapes, self._model.dtype

        def plan(
            arenas: Sequence[ArenaId],
            positions: mx.array,
            slot: mx.array,
            turned: mx.array | None,
        ) -> StepPlan:
            return plan_by_slots(
                shapes,
                arenas,
                positions=positions,
                slot=slot,
                lone_row=alone,
                dtype=dtype,
                turned=turned,
            )

        step = self._step((layout.shapes, alone), plan)
        # Only the call refers to the arrays: whatever else did would make each write copy them.
        turned = self._turns_of(batch, positions, layout.source)
        hidden, arrays = step(
            tokens, positions, layout.slot, turned, lend(self._layers, layout.arenas)
        )
        settle(self._layers, layout.arenas, arrays)
        return hidden if layout.order is None else hidden[layout.order]

    def _pass_tokens(self, batch: Batch, layout: TokenLayout) -> mx.array:
        assert self._layers is not None, "caches in place are standard"
        tokens = batch.tokens.reshape(-1)
        if layout.source is not None:
            tokens = tokens[layout.source]
        shape, several, dtype = layout.shape, layout.several, self._model.dtype

        def plan(
            arenas: Sequence[ArenaId],
            positions: mx.array,
            slots: mx.array,
            turned: mx.array | None,
        ) -> StepPlan:
            (arena,) = arenas
            return plan_tokens(
                shape,
                arena,
                positions=positions,
                slots=slots,
                several=several,
                dtype=dtype,
                turned=turned,
            )

        step = self._step(((shape,), (layout.flat, several)), plan)
        arenas = [layout.arena]
        turned = self._turns_of(batch, layout.positions, layout.source)
        hidden, arrays = step(
            tokens, layout.positions, layout.slots, turned, lend(self._layers, arenas)
        )
        settle(self._layers, arenas, arrays)
        return hidden if layout.count == layout.flat else hidden[: layout.count]

    def _turns_by_axes(self, batch: Batch) -> bool:
        """Tell whether a batch stands where no compiled pass turns its tokens by."""
        if batch.turns is None:
            return False
        return batch.turns.ndim > 1 or not self.capabilities.turns_apart

    def _turns_of(
        self, batch: Batch, positions: mx.array, source: mx.array | None
    ) -> mx.array | None:
        """Return where each flat token stands for rotations, int32, as `positions`.

        source: which of the batch's tokens each is. None: the model's all stand at positions.
        """
        if not self.capabilities.turns_apart:
            return None
        if batch.turns is None:
            return positions
        turned = batch.turns
        if batch.width > 1:
            turned = (turned[:, None] + mx.arange(batch.width, dtype=mx.int32)).reshape(-1)
        return turned if source is None else turned[source]

    def _step(self, key: _Key, plan: Plans) -> Step:
        """Return the compiled step of a key, whose first part are its arenas' shapes."""
        step = self._steps.get(key)
        if step is None:
            assert self._layers is not None, "asked for by slots"
            layers = self._caches.layers
            traced = _trace(self._model, layers, self._layers, plan, arenas=len(key[0]))
            step = self._steps[key] = mx.compile(traced)
            if len(self._steps) > STEPS_MAX:
                self._steps.popitem(last=False)
        self._steps.move_to_end(key)
        return step


def lend(layers: Sequence[SliceableCache], arenas: Sequence[ArenaId]) -> list[mx.array]:
    """Take the arenas' arrays out of all layers, layer by layer."""
    return [array for layer in layers for arena in arenas for array in layer.lend(arena)]


def settle(
    layers: Sequence[SliceableCache], arenas: Sequence[ArenaId], arrays: Sequence[mx.array]
) -> None:
    """Put what `lend` took back, in the same order."""
    each = len(arrays) // (len(layers) * len(arenas))
    parts = iter(range(0, len(arrays), each))
    for layer in layers:
        for arena in arenas:
            start = next(parts)
            layer.settle(arena, arrays[start : start + each])


def _trace(
    model: Model,
    all_layers: Sequence[LayerCache | None],
    layers: tuple[SliceableCache, ...],
    make_plan: Plans,
    *,
    arenas: int,
) -> Step:
    """Return the step over so many arenas; it is called only while it is traced."""
    # No arena has such a name: those that exist lie untouched beside these.
    names = [ArenaId(-1 - index) for index in range(arenas)]

    def step(
        tokens: mx.array,
        positions: mx.array,
        slots: mx.array,
        turned: mx.array | None,
        arrays: list[mx.array],
    ) -> tuple[mx.array, list[mx.array]]:
        settle(layers, names, arrays)
        plan = make_plan(names, positions, slots, turned)
        ids = tokens[:, None]
        batch = Batch(tokens=ids, offsets=positions, lengths=(), rows=(), turns=turned)
        hidden = model.forward(batch, _TracedCaches(all_layers, plan))
        return hidden, lend(layers, names)

    return step


@dataclass(frozen=True, slots=True)
class _TracedCaches:
    """The layers, and a plan that has been made already."""

    layers: Sequence[LayerCache | None]
    traced_plan: StepPlan

    def plan(
        self,
        rows: tuple[RowId, ...],
        *,
        offsets: mx.array,
        lengths: tuple[int, ...],
        width: int,
        dtype: mx.Dtype,
        counts: tuple[int, ...] = (),
        lasts: tuple[int, ...] = (),
    ) -> StepPlan:
        """Return the plan."""
        del rows, offsets, lengths, width, dtype, counts, lasts
        return self.traced_plan
