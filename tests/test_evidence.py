"""What docs/evidence names as proof is there: no file and no test goes without being missed."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.tidy.tree import ROOT

FOLDER = ROOT / "docs" / "evidence"
DOCUMENTS = sorted(path.name for path in FOLDER.glob("*.md"))
FAULTS = range(1, 44)
"""The numbers of the faults in caches.md."""
SCHEDULER_FAULTS = range(1, 28)
"""The numbers of the weaknesses of other schedulers in scheduler.md."""
CASES_MIN = 18
"""How many numeric cases caches.md has, those about drafts included."""


@cache
def names_in(path: Path) -> frozenset[str]:
    """Return the names of the functions in a file, tests and their helpers alike."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, kinds))


def node_ids(text: str) -> Iterator[tuple[str, str]]:
    """Yield (path, test or "") of each proof; `::test` goes on with the path before it."""
    for line in text.splitlines():
        path = ""
        for quoted in re.findall(r"`([^`]+)`", line):
            if quoted.startswith("tests/"):
                path, _, test = quoted.partition("::")
                yield path, test.partition("[")[0]
            elif quoted.startswith("::"):
                yield path, quoted[2:].partition("[")[0]


def rows(text: str) -> list[list[str]]:
    """Return the cells of every row of every table, headings and rules left out."""
    lines = [line.strip().strip("|").split(" | ") for line in text.splitlines() if line[:1] == "|"]
    cells = [[cell.strip() for cell in line] for line in lines]
    return [row for row in cells if not re.fullmatch(r"[-| ]+", row[0]) and len(row) > 1]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_test_that_is_named_exists(document: str) -> None:
    """A proof is a file of tests, a folder of them, or a test in a file."""
    ids = list(node_ids((FOLDER / document).read_text(encoding="utf-8")))

    for path, test in ids:
        assert (ROOT / path).exists(), path
        assert not test or test in names_in(ROOT / path), f"{path}::{test}"
    assert ids or document == "README.md"


def test_a_proof_that_is_gone_is_found() -> None:
    """Paths and tests are read as they are written, with parameters and without."""
    line = "| 1 | `tests/a.py::test_x[1]`, `::test_y`; `tests/b.py` | `make bench` |"

    assert list(node_ids(line)) == [
        ("tests/a.py", "test_x"),
        ("tests/a.py", "test_y"),
        ("tests/b.py", ""),
    ]
    assert "test_a_proof_that_is_gone_is_found" in names_in(Path(__file__))
    assert "test_nobody_wrote" not in names_in(Path(__file__))


def test_every_fault_and_case_of_the_caches_has_its_row() -> None:
    """Each has a test, or a word why it is not this milestone's."""
    table = rows((FOLDER / "caches.md").read_text(encoding="utf-8"))
    numbered = {int(row[0]): row for row in table if row[0].isdecimal()}
    cases = [row for row in table if row[0].startswith("case: ")]

    assert sorted(numbered) == list(FAULTS)
    assert len(cases) >= CASES_MIN
    for row in [*numbered.values(), *cases]:
        assert "`tests/" in row[-1] or row[-1].startswith("excluded: "), row


def test_every_fault_of_other_schedulers_has_its_row() -> None:
    """Each has a test, or a scripted scenario."""
    text = (FOLDER / "scheduler.md").read_text(encoding="utf-8")
    numbered = {int(row[0]): row for row in rows(text) if row[0].isdecimal()}

    assert sorted(numbered) == list(SCHEDULER_FAULTS)
    assert all("`tests/" in row[-1] for row in numbered.values())
