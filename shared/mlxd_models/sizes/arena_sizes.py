"""How many tokens arenas are made for, how many slots they have, and what all may take. Pure.

Invariants:
- Arenas take at most `kv_tokens_bound` tokens and `slots_bound` slots, however rows come and go.
- The shapes in use are few: `capacity_classes` x `slot_sizes`, at most `ARENA_SHAPES_MAX`.
"""

from __future__ import annotations

CAPACITY_MIN = 256
"""Tokens of the smallest class; attention kernels like multiples of 256."""

ARENAS_MAX = 6
"""Arenas alive at once, hence attention calls a layer."""

CLASSES_MAX = ARENAS_MAX - 1
"""Capacity classes where rows are many: one arena each, and one more into which a class moves."""

ROWS_FEW = ARENAS_MAX
"""So few rows never have more than `ARENAS_MAX` arenas, whatever the classes."""

CLASSES_MAX_FEW_ROWS = 10
"""Capacity classes where rows are few."""

BLOCK_TOKENS = 4096
"""A class's first arena holds as many, so that short rows share one from the start."""

ARENA_SHAPES_MAX = 45
"""Pairs of a capacity and a number of slots, over all rows and contexts."""


def capacity_classes(context_max: int, rows_max: int) -> tuple[int, ...]:
    """Return the capacities in use, ascending; the last is the context rounded up.

    Powers of two. Where these are too many, some are left out, small ones first: there a row that
    takes four times its length wastes least. One that the last is less than half above is, too.
    """
    top = -(-context_max // CAPACITY_MIN) * CAPACITY_MIN
    count = CLASSES_MAX_FEW_ROWS if rows_max <= ROWS_FEW else CLASSES_MAX
    doublings = (2 * top // CAPACITY_MIN // 3).bit_length()
    steps = min(count - 1, doublings)
    classes = [CAPACITY_MIN]
    for step in range(steps - 1):
        left = doublings - (classes[-1] // CAPACITY_MIN).bit_length() + 1
        classes.append(classes[-1] << -(-left // (steps - step)))
    return tuple(classes) if not steps else (*classes, top)


def slot_sizes(rows_max: int) -> tuple[int, ...]:
    """Return the numbers of slots that an arena may have, ascending: powers of two, and all rows.

    `rows_max` itself is the last: no arena has more slots than there can be rows.
    """
    powers = [1 << bit for bit in range(rows_max.bit_length()) if 1 << bit < rows_max]
    return (*powers, rows_max)


def block_slots(capacity: int, rows_max: int) -> int:
    """Return how many slots a class's first arena has where nothing speaks against it."""
    wanted = max(BLOCK_TOKENS // capacity, 1)
    return max(size for size in slot_sizes(rows_max) if size <= wanted)


def kv_tokens_bound(context_max: int, rows_max: int) -> int:
    """Return the most tokens that all arenas together ever hold: every row at full length."""
    return rows_max * capacity_classes(context_max, rows_max)[-1]


def slots_bound(rows_max: int) -> int:
    """Return the most slots that all arenas together ever have."""
    return 3 * rows_max
