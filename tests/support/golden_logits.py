"""Logits that a reference has made of cases: the file is written once, and compared with."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final, Protocol, TypeVar

COLUMNS: Final = tuple(range(0, 320, 13))
"""Of the vocabulary, at every position of a prompt: those that are kept."""


class Named(Protocol):
    """A case that has a name."""

    @property
    def name(self) -> str:
        """What tells it from the others."""


_Case = TypeVar("_Case", bound=Named)


def read_golden(file: Path) -> dict[str, list[list[float]]]:
    """Return what the reference has written down: of each case, by position and column."""
    written: dict[str, list[list[float]]] = json.loads(file.read_text(encoding="utf-8"))
    return written


def write_golden(
    file: Path, cases: Iterable[_Case], logits_of: Callable[[_Case, Path], list[list[float]]]
) -> None:
    """Write the logits of all cases, by name; each has a scratch folder of its own."""
    with tempfile.TemporaryDirectory() as root:
        written = {case.name: logits_of(case, Path(root) / case.name) for case in cases}
    file.write_text(json.dumps(written) + "\n", encoding="utf-8")
