"""Every fast path against the plain one: a line here for each, and how the two are compared.

A new path is a member of `FastPath`, a line in `PATHS`, and a question to `SWITCHES` where it is
taken.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from mlxd_shared.domain.devices import DeviceKind
from mlxd_shared.domain.fast_paths import FastPath
from mlxd_worker.kernels.switches import SWITCHES
from mlxd_worker.proof.judging import TOLERANCES, disagreement, divergence
from mlxd_worker.proof.streams import Heard, run_company
from mlxd_worker.proof.subjects import Subject, form_on
from mlxd_worker.proof.walks import Walk, errors_between, step_through

Compare = Callable[[Subject, FastPath], str | None]
"""Returns how a model that takes a path disagrees with the same without it, or None."""


@dataclass(frozen=True, slots=True)
class PathProof:
    """One path: where there is one, and what proves it."""

    path: FastPath
    kinds: frozenset[DeviceKind]
    compare: Compare


def compare_logits(subject: Subject, path: FastPath) -> str | None:
    """Compare every token's logits."""
    fast = step_through(subject)
    with SWITCHES.without(path):
        plain = step_through(subject)
    return compare_walks(subject, fast, plain)


def compare_streams(subject: Subject, path: FastPath) -> str | None:
    """Compare the tokens of streams that come and go."""
    fast = run_company(subject)
    with SWITCHES.without(path):
        plain = run_company(subject, margins=True)
    return compare_heard(subject, plain, fast)


def compare_walks(subject: Subject, ours: Walk, theirs: Walk) -> str | None:
    """Return how two walks disagree, or None."""
    allowed = TOLERANCES[form_on(subject.kind)]
    return disagreement(errors_between(ours, theirs), allowed, routes=subject.routes)


def compare_heard(subject: Subject, plain: Sequence[Heard], others: Sequence[Heard]) -> str | None:
    """Return where the first stream leaves its plain one; `plain` has kept its margins."""
    allowed = TOLERANCES[form_on(subject.kind)]
    for index, (left, right) in enumerate(zip(plain, others, strict=True)):
        problem = divergence(left.ids, left.margins, right.ids, allowed)
        if problem is not None:
            return f"stream {index}: {problem}"
    return None


_CPU: Final = frozenset({DeviceKind.CPU})
_CUDA: Final = frozenset({DeviceKind.CUDA})
_ALL: Final = frozenset(DeviceKind)
PATHS: Final[tuple[PathProof, ...]] = (
    PathProof(FastPath.COMPILED_STEP, _CUDA, compare_logits),
    PathProof(FastPath.DECODE_KERNEL, _CUDA, compare_logits),
    PathProof(FastPath.EXPONENTIALS, _CPU, compare_logits),
    PathProof(FastPath.FEW_ROWS, _CPU, compare_logits),
    PathProof(FastPath.LANES, _CPU, compare_logits),
    PathProof(FastPath.ROW_KERNEL, _CUDA, compare_logits),
    PathProof(FastPath.JOINED_PASSES, _CPU, compare_streams),
    PathProof(FastPath.PROMPTS_TOGETHER, _ALL, compare_streams),
    PathProof(FastPath.RUN_AHEAD, _ALL, compare_streams),
)
