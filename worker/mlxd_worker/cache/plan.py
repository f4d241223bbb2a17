"""How one forward pass meets the arenas: index arrays made once and shared by all layers.

Invariants:
- A plan holds index arrays and masks only, never a cache's array or a view of one.
- Every write is inside what its row reserved; `RowCaches.plan` has checked that on the host, since
  an index out of range would overwrite another row in silence.
"""

from dataclasses import dataclass

import mlx.core as mx


@dataclass(frozen=True, slots=True)
class Chunk:
    """One row's several tokens (prefill): written as a block, attended causally."""

    capacity: int
    slot: int
    length: int
    """Tokens the row holds afterwards; exactly these are attended."""
    start: mx.array
    """int32 [2]: slot and position of the first token."""


@dataclass(frozen=True, slots=True)
class Group:
    """The part of a batch that lives in one arena: one write and one attention call a layer."""

    capacity: int
    members: mx.array | None
    """int32 [m]: the batch's rows that live here; None where they are `first .. first + m`."""
    queriers: mx.array | None
    """int32 [slots_used]: whose query each slot takes; None where these are the members.

    A slot whose row is not in the batch takes any; what it yields is dropped.
    """
    first: int
    count: int
    slots_used: int
    span: int
    """Positions attended, from 0; the mask hides what lies beyond each row's own length."""
    write_slots: mx.array
    """int32 [m, 1]."""
    write_positions: mx.array
    """int32 [m, width]."""
    mask: mx.array
    """Additive [slots_used, 1, width, span]: 0 where a position is visible, else -inf."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One forward pass: a chunk of one row, or groups of rows."""

    width: int
    chunk: Chunk | None
    groups: tuple[Group, ...]
    order: mx.array | None
    """int32 [N]: where in the groups' results, one after another, each batch row's stands;
    None where they are in order already."""
