"""When those come back who are refused because too many come at once.

Invariants:
- CALLS_RETRY_PER_S of a crowd are promised to each second, one second after another, and apart from
  one another within it. Only what a crowd has beyond CALLS_RETRY_MAX_S of these begins anew.
"""

from __future__ import annotations

from typing import Final

from mlxd_shared import config

_GOLDEN: Final = 0.6180339887498949
"""Its multiples, less whole numbers, never come close to one another."""


def retry_after_s(number: int) -> float:
    """Return when the `number`th call, from 1 on, that a crowd had refused should come back."""
    second = (number - 1) // config.CALLS_RETRY_PER_S % config.CALLS_RETRY_MAX_S
    return config.CALLS_RETRY_MIN_S + second + number * _GOLDEN % 1.0
