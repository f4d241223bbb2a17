"""The real inputs: small enough to come with the tests, each with its source and its licence."""

from __future__ import annotations

import re
from pathlib import PurePosixPath

import pytest

from tests.real_inputs import REAL_INPUTS, real_input
from tests.tidy import tree

NBYTES_MAX = 15 * 10**6
ABOUT = {"README.md", "licences", "described.json"}  # the last says what our own code finds
FOLDER = REAL_INPUTS.relative_to(tree.ROOT).as_posix()


def rows() -> dict[str, str]:
    """Map the path of each row of the table in README.md to what its last column says."""
    text = (REAL_INPUTS / "README.md").read_text(encoding="utf-8")
    cells = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return {row[0]: row[-1] for row in cells[1:]}


def files() -> list[PurePosixPath]:
    """Every committed file of the folder, by its path in there."""
    names = (name for name in tree.names() if name.startswith(f"{FOLDER}/"))
    return [PurePosixPath(name).relative_to(FOLDER) for name in names]


def test_they_are_small() -> None:
    """All together are at most what a clone can be asked to carry."""
    assert sum((REAL_INPUTS / file).stat().st_size for file in files()) <= NBYTES_MAX


def test_every_file_has_a_source_and_a_licence() -> None:
    """A row of the table is about the file or a folder that it lies in; no row is about nothing."""
    inputs = [file for file in files() if file.parts[0] not in ABOUT]
    rows_by_path = rows()

    unnamed = [
        file for file in inputs if rows_by_path.keys().isdisjoint(map(str, [file, *file.parents]))
    ]
    assert not unnamed
    assert inputs
    assert [path for path in rows_by_path if not (REAL_INPUTS / path).exists()] == []


@pytest.mark.parametrize("path", rows())
def test_the_licence_is_known(path: str) -> None:
    """It is public domain, or one whose text is at hand, or facts that nobody owns."""
    about = rows()[path]

    assert re.search(r"MIT|Apache-2\.0|CC-BY-4\.0|public domain|facts", about)
    assert [name for name in re.findall(r"`(licences/[^`]+)`", about) if not real_input(name)] == []


def test_what_is_absent_is_an_error() -> None:
    """A test that asks for a file that nobody has fails; it does not skip."""
    with pytest.raises(FileNotFoundError, match="not in tests/data: models/none"):
        real_input("models", "none")
