"""How hard the property tests try: the same few examples in `make test`, many fresh in soak."""

from __future__ import annotations

import os

VARIABLE = "MLXD_FUZZ_FACTOR"
FACTOR = int(os.environ.get(VARIABLE, "1"))
SAME_EACH_TIME = FACTOR == 1
"""Whether examples are derived from the test alone, so that a run can be repeated."""

IN_CI = bool(os.environ.get("CI"))
"""Whether this is the full run of `.ci/run`, which has more time than `make test`."""


def examples(count: int) -> int:
    """Return how many examples a test tries that tries `count` in the short run."""
    return count * FACTOR
