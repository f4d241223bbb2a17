"""Every fast path against the plain one, and what must hold of the engine whatever paths it takes.

A new path is a member of `FastPath`, a line in `PATHS` (or in `PRODUCT_PATHS`), and a question to
`SWITCHES` where it is taken. A new check is a function and a line in `CHECKS`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from mlxd_shared.domain.devices import DeviceKind
from mlxd_shared.domain.fast_paths import FastPath
from mlxd_worker.kernels.switches import SWITCHES
from mlxd_worker.proof.judging import TOLERANCES, disagreement, divergence
from mlxd_worker.proof.streams import Heard, run_alone, run_company, run_resumed
from mlxd_worker.proof.subjects import Subject, form_on
from mlxd_worker.proof.walks import Walk, errors_between, read_whole, step_through

Check = Callable[[Subject], str | None]
"""Returns what does not hold, or None."""

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


def check_company(subject: Subject) -> str | None:
    """A row's tokens are those of its lone run, whatever else is decoded or prefilled."""
    return compare_heard(subject, run_alone(subject, margins=True), run_company(subject))


def check_places(subject: Subject) -> str | None:
    """What steps write in place is where a reader of the whole text would have it."""
    return compare_walks(subject, step_through(subject), read_whole(subject))


def check_resumed(subject: Subject) -> str | None:
    """A stream resumed from its middle generates what the whole one did."""
    whole = run_alone(subject, margins=True)
    return compare_heard(subject, whole, run_resumed(subject, whole))


CHECKS: Final[Mapping[str, Check]] = MappingProxyType({
    "a row is the same in any company": check_company,
    "steps write in place": check_places,
    "a resumed stream goes on": check_resumed,
})  # fmt: skip

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
    PathProof(FastPath.ROWS_KERNEL, _CUDA, compare_logits),
    PathProof(FastPath.JOINED_PASSES, _CPU, compare_streams),
    PathProof(FastPath.PROMPTS_TOGETHER, _ALL, compare_streams),
    PathProof(FastPath.RUN_AHEAD, _ALL, compare_streams),
)
