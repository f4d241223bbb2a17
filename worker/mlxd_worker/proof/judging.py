"""When two ways of computing agree, and when one is slower: decided from figures alone. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from mlxd_models.sizes.weight_forms import FloatType
from mlxd_shared.domain.fast_paths import FastPath


@dataclass(frozen=True, slots=True)
class Result:
    """What one check of one subject came to."""

    check: str
    subject: str
    problem: str = ""
    """Empty: nothing is wrong."""
    off: FastPath | None = None
    """The path that is switched off for it; None if none is to blame."""


@dataclass(frozen=True, slots=True)
class Tolerance:
    """What rounding may do."""

    relative: float
    """Of a token's logits, to the largest of them."""
    near_tie: float
    """Where the two best log-probabilities are nearer than this, either token is right."""


TOLERANCES: Final = {FloatType.F32: Tolerance(2e-3, 5e-3), FloatType.BF16: Tolerance(0.12, 0.5)}
"""By the form of the weights. A wrong result is off by the logits' own size."""
REROUTED_MAX: Final = 0.2
"""The share of tokens of which a rounding may choose other experts: they are then off by more."""
SLOWER: Final = 1.1
"""From this ratio of medians on a path is slower than the plain way."""
FAIR: Final = 1.05
"""Below this ratio of medians more rounds would hardly find it slower."""


def disagreement(errors: Sequence[float], allowed: Tolerance, *, routes: bool) -> str | None:
    """Return how logits disagree, or None.

    errors: of each token, relative; what is no number disagrees. routes: whether the model has
    experts.
    """
    wrong = [error for error in errors if not error <= allowed.relative]
    if len(wrong) <= (REROUTED_MAX * len(errors) if routes else 0):
        return None
    share = f"{len(wrong)} of {len(errors)} tokens"
    return f"logits of {share} are off by up to {max(wrong):.2g}, at most {allowed.relative:g} may"


def divergence(
    plain: Sequence[int], margins: Sequence[float], other: Sequence[int], allowed: Tolerance
) -> str | None:
    """Return where a stream leaves the plain one although no two tokens were near, or None.

    margins: of the plain stream, at each place; behind a near tie that fell otherwise nothing is
    compared.
    """
    for place, (left, right) in enumerate(zip(plain, other, strict=False)):
        if left != right:
            near = margins[place] < allowed.near_tie
            return None if near else f"token {place} is {right}, not {left}"
    if len(plain) != len(other):
        return f"{len(other)} tokens, not {len(plain)}"
    return None


def slowness(with_s: Sequence[float], without_s: Sequence[float]) -> str | None:
    """Return by how much a path is slower than doing without it, or None.

    Both by medians and by the best runs: a disturbance of some runs is not the path's.
    """
    ratio = statistics.median(with_s) / statistics.median(without_s)
    if ratio < SLOWER or min(with_s) < SLOWER * min(without_s):
        return None
    return f"{ratio:.2f} times as long as without"


def is_fair(with_s: Sequence[float], without_s: Sequence[float]) -> bool:
    """Return whether a path is so plainly no slower that it need not be timed again."""
    return statistics.median(with_s) < FAIR * statistics.median(without_s)
