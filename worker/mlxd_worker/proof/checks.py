"""What must hold of the engine whatever paths it takes: a function and a line in `CHECKS` each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

from mlxd_worker.proof.paths import compare_heard, compare_walks
from mlxd_worker.proof.streams import run_alone, run_company, run_resumed
from mlxd_worker.proof.subjects import Subject
from mlxd_worker.proof.walks import read_whole, step_through

Check = Callable[[Subject], str | None]
"""Returns what does not hold, or None."""


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
