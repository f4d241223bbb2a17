"""How hard the tests try: few examples in `make test`, the same each time; more of them in CI, and
all of them, with many fresh ones, in soak.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")

VARIABLE = "MLXD_FUZZ_FACTOR"
FACTOR = int(os.environ.get(VARIABLE, "1"))
SAME_EACH_TIME = FACTOR == 1
"""Whether examples are derived from the test alone, so that a run can be repeated."""

IN_CI = bool(os.environ.get("CI"))
"""Whether this is the full run of `.ci/run`, which has more time than `make test`."""

IN_FULL = IN_CI or not SAME_EACH_TIME
"""Whether this is more than `make test`."""

IN_SOAK = not SAME_EACH_TIME
"""Whether this is a run of the soak, which has all the time there is: every case is tried."""


def examples(count: int, *, few: int | None = None, in_ci: int | None = None) -> int:
    """Return how many examples a test tries: `count` is for `make soak`.

    few: how many in `make test`; a third unless given. in_ci: how many in CI; half unless given.
    """
    if IN_SOAK:
        return count * FACTOR
    if IN_CI:
        return -(-count // 2) if in_ci is None else in_ci
    return -(-count // 3) if few is None else few


def spread_evenly(cases: Sequence[T], count: int, *, in_ci: int | None = None) -> list[T]:
    """Return all cases in the soak; elsewhere `count` of them, evenly spread, the first among them.

    in_ci: how many in CI; half of them, and no fewer than `count`, unless given.
    """
    if IN_SOAK:
        count = len(cases)
    elif IN_CI:
        count = max(count, -(-len(cases) // 2)) if in_ci is None else in_ci
    if count >= len(cases):
        return list(cases)
    return [cases[index * len(cases) // count] for index in range(count)]
