"""What layers of experts take, from their sizes and names alone. Pure.

Invariants:
- Both who plans a load and who carries it out reckon with these very sums.
"""

from __future__ import annotations

EXPERT_MARKS = (".mlp.switch_mlp.", ".mlp.experts.")
"""In the name of every expert's weight, stored together or one by one."""


def routed_width(chosen: int, hidden: int, mlp: int) -> int:
    """Return the widest part of what `chosen` experts make of one position, in values."""
    return chosen * (hidden + mlp)


def is_expert(name: str) -> bool:
    """Tell whether a tensor is an expert's: such weights are never unpacked whole."""
    return any(mark in name for mark in EXPERT_MARKS)
