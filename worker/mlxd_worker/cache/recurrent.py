"""The recurrent cache: a state of fixed size a row, which every token changes as a whole.

Invariants:
- An arena is one array `[slots, *shape]` for each of the layer's states, whatever the capacity: a
  long row takes no more than a short one.
- States are read before the step and written after it, so a read must not share memory with the
  arena: it is a copy, gathered and evaluated while nothing is in flight. Were it lazy, the queue
  would still hold the arena when the write is dispatched, and the write would copy all of it
  (measured on a CPU, an arena of 8.4 MB: 1 row of 64, 0.45 ms against 0.80 and 0.4 MB at the peak
  against 8.8; evaluating takes 16 us).
- A write copies into the row's slot. So nothing of the step (the chunk whose last inputs become the
  convolution's tail, above all) stays alive with the state, and rows not in the batch keep theirs.
- A state keeps the type it was declared with. Another one is refused rather than converted: a
  recurrence that was rounded to bfloat16 every step drifts without a sign.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import mlx.core as mx

from mlxd_worker.cache.base import ArenaId, Kind, Place, RowError
from mlxd_worker.cache.plan import Group, StepPlan


@dataclass(frozen=True, slots=True)
class RowState:
    """One of the things a layer remembers of a row."""

    name: str
    shape: tuple[int, ...]
    """Of one row."""
    dtype: mx.Dtype


class RecurrentCache:
    """One recurrent layer's states for all rows. One owner: the engine thread."""

    def __init__(self, states: Sequence[RowState]) -> None:
        """Return a cache without arenas for these states, in this order everywhere."""
        self._states = tuple(states)
        self._arenas: dict[ArenaId, list[mx.array]] = {}

    @property
    def kind(self) -> Kind:
        """What this layer remembers."""
        return Kind.RECURRENT

    @property
    def nbytes(self) -> int:
        """The exact bytes of the live arrays."""
        return sum(array.nbytes for arena in self._arenas.values() for array in arena)

    def slot_nbytes(self, capacity: int) -> int:
        """Return the bytes of one row's states: the same for every capacity."""
        del capacity
        return sum(math.prod(state.shape) * state.dtype.size for state in self._states)

    def arrays(self) -> Mapping[str, mx.array]:
        """Return the live arrays by name; do not keep them across a step."""
        return {
            f"{state.name}.{arena}": array
            for arena, arrays in self._arenas.items()
            for state, array in zip(self._states, arrays, strict=True)
        }

    def open(self, arena: ArenaId, *, capacity: int, slots: int) -> None:
        """Make an arena; its slots are zero."""
        del capacity
        arrays = [mx.zeros((slots, *state.shape), state.dtype) for state in self._states]
        mx.eval(arrays)
        self._arenas[arena] = arrays

    def close(self, arena: ArenaId) -> None:
        """Release an arena."""
        del self._arenas[arena]

    def move(self, source: Place, target: Place) -> None:
        """Copy one row's states; the source becomes free."""
        self._put_row(target, self._row(source))

    def clear(self, place: Place) -> None:
        """Zero one slot."""
        self._put_row(place, [mx.zeros((1, *state.shape), state.dtype) for state in self._states])

    def read(self, place: Place, start: int, stop: int) -> tuple[mx.array, ...]:
        """Return compact copies of the row's states, each `[1, *shape]`; it stands at `stop`."""
        del start, stop
        return tuple(self._row(place))

    def write(self, place: Place, start: int, stop: int, state: tuple[mx.array, ...]) -> None:
        """Put back what `read` returned; the row then stands at `stop`.

        Raises:
            RowError: wrong number, shape or type of states; nothing was written.
        """
        del start, stop
        self._check(state, rows=1)
        self._put_row(place, state)

    def rewinds(self, offset: int, target: int) -> bool:
        """Tell whether a row at `offset` stands at `target`: a state cannot be undone."""
        return offset == target

    def states(self, plan: StepPlan) -> tuple[mx.array, ...]:
        """Return the states before the pass, each `[N, *shape]` in the batch's order, evaluated.

        A row that has had no token finds zeros. The caller owns the copies.
        """
        if plan.chunk is not None:
            slot = plan.shared((plan.chunk.arena, "slot"), lambda: _slot_of_chunk(plan))
            taken = [mx.take(array, slot, axis=0) for array in self._arenas[plan.chunk.arena]]
        else:
            taken = [self._gathered(plan, index) for index in range(len(self._states))]
        mx.eval(taken)
        return tuple(taken)

    def put(self, plan: StepPlan, states: Sequence[mx.array]) -> None:
        """Write the states after the pass, each `[N, *shape]` in the batch's order; lazy.

        Takes effect when `arrays` are evaluated, in place if nobody else holds one of them.

        Raises:
            RowError: wrong number, shape or type of states; nothing was written.
        """
        if plan.chunk is not None:
            self._check(states, rows=1)
            slot = plan.shared((plan.chunk.arena, "slot"), lambda: _slot_of_chunk(plan))
            arena = self._arenas[plan.chunk.arena]
            for index, state in enumerate(states):
                arena[index] = mx.slice_update(arena[index], state, slot, axes=(0,))
            return
        self._check(states, rows=sum(group.count for group in plan.groups))
        for group in plan.groups:
            arena, slots = self._arenas[group.arena], _slots_of(plan, group)
            for index, state in enumerate(states):
                # By position in the list: a name for the array would be a second holder of it.
                arena[index][slots] = _members(state, group)

    def written(self, result: mx.array) -> mx.array:
        """Return `result` such that whoever evaluates it has the last `put` carried out first.

        Left to themselves, the writes of all layers come at the end of the pass, and until then the
        activations that the states are made of stay alive, layer upon layer (6 layers, 512 tokens:
        58 MB at the peak against 48).
        """
        ordered: list[mx.array] = mx.depends([result], list(self.arrays().values()))
        return ordered[0]

    def _gathered(self, plan: StepPlan, index: int) -> mx.array:
        parts = [
            mx.take(self._arenas[group.arena][index], _slots_of(plan, group), axis=0)
            for group in plan.groups
        ]
        joined = parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=0)
        return joined if plan.member_order is None else mx.take(joined, plan.member_order, axis=0)

    def _row(self, place: Place) -> list[mx.array]:
        # Gathered, not sliced, and evaluated: a view would make the next write copy the arena.
        slot = mx.array([place.slot], dtype=mx.int32)
        copies = [mx.take(array, slot, axis=0) for array in self._arenas[place.arena]]
        mx.eval(copies)
        return copies

    def _put_row(self, place: Place, states: Sequence[mx.array]) -> None:
        arena, slot = self._arenas[place.arena], mx.array([place.slot], dtype=mx.int32)
        for index, state in enumerate(states):
            arena[index] = mx.slice_update(arena[index], state, slot, axes=(0,))
        mx.eval(arena)

    def _check(self, states: Sequence[mx.array], *, rows: int) -> None:
        if len(states) != len(self._states):
            raise RowError(f"{len(states)} states, the layer has {len(self._states)}")
        for wanted, state in zip(self._states, states, strict=True):
            shape = (rows, *wanted.shape)
            if state.shape != shape or state.dtype != wanted.dtype:
                problem = f"{wanted.name}: {state.dtype} {state.shape}"
                raise RowError(f"{problem} is not {wanted.dtype} {shape}")


def _slot_of_chunk(plan: StepPlan) -> mx.array:
    assert plan.chunk is not None
    return mx.array([plan.chunk.slot], dtype=mx.int32)


def _slots_of(plan: StepPlan, group: Group) -> mx.array:
    return plan.shared((group.arena, "slots"), lambda: group.write_slots.reshape(-1))


def _members(state: mx.array, group: Group) -> mx.array:
    if group.members is not None:
        return state[group.members]
    if group.count == state.shape[0]:
        return state
    return state[group.first : group.first + group.count]
