"""Each fault that users of other schedulers report, as a conversation that does not end in it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.simulation.scripts import FOLDER, replay

SCRIPTS = sorted(FOLDER.glob("*.txt"))


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_a_scenario(path: Path) -> None:
    """The core answers as the script says; `scripts --rewrite` is for changes that are meant."""
    text = path.read_text(encoding="utf-8")
    assert text.startswith("# "), "a script says first what it proves"
    assert replay(text) == text


def test_there_are_scenarios() -> None:
    """A folder that was not found proves nothing."""
    assert len(SCRIPTS) >= 20
