"""A process that dies while it writes leaves nothing that is wrong, and loses nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.support.effort import examples

KILLS = examples(200, few=60)


def test_kills_at_random_points_of_writing(tmp_path: Path) -> None:
    """No block is wrong or torn afterwards, no file is left that is none, the budget holds, and
    what was said to be written is there.
    """
    writer = "tests.shared.blocks.killed_writer"
    command = [sys.executable, "-m", writer, str(tmp_path / "blocks"), str(KILLS)]
    run = subprocess.run(command, check=True, capture_output=True, text=True)

    *lines, last = run.stdout.splitlines()
    counts = json.loads(last)
    assert counts.pop("killed") >= KILLS * 3 // 4
    assert len(lines) >= KILLS // 4, "as many died in the middle of a file, with a line each"
    assert set(counts.values()) == {0}, counts
