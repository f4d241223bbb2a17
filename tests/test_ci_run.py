"""The CI script as a program: its order, its exit code, its report. `make` is a stand-in here, so
that a stage fails when the test wants it to; the real stages are what CI itself runs.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
STAGES = ["demo", "setup", "tools", "lint", "types", "imports", "proto-check", "test"]
TIMEOUT_S = 60
MAKE = """#!/usr/bin/env bash
echo "$@" >> "$MADE"
if read -r line; then echo "there is something to read"; exit 3; fi
[ "$CI" = "$WANTED_CI" ] && [ -n "$VENV" ] && [ "$1" != "$BROKEN" ]
"""


def run_ci(
    folder: Path, *, broken: str, ci: str | None = None
) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """Run the script with a `make` whose target `broken` fails; also answer the targets made.

    `ci` is the variable CI as the caller has it; None is unset.
    """
    stages_file = folder / "made.txt"
    stand_in = folder / "make"
    stand_in.write_text(MAKE, encoding="utf-8")
    stand_in.chmod(0o755)
    path = f"{folder}:{os.environ['PATH']}"
    environment = {name: value for name, value in os.environ.items() if name != "CI"}
    environment |= {"PATH": path, "MADE": str(stages_file), "BROKEN": broken}
    environment |= {"WANTED_CI": "true"} if ci is None else {"WANTED_CI": ci, "CI": ci}
    done = subprocess.run(
        [str(ROOT / ".ci" / "run")], cwd=folder, env=environment, input="typed by nobody\n",
        capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
    )  # fmt: skip
    return done, stages_file.read_text(encoding="utf-8").split()


def test_every_stage_runs_and_the_run_passes(tmp_path: Path) -> None:
    """With nothing broken: each stage once, in order, in CI's environment, without a terminal."""
    done, stages = run_ci(tmp_path, broken="")

    assert done.returncode == 0, done.stdout + done.stderr
    assert stages == STAGES
    assert "== ci: ok" in done.stdout


def test_a_run_may_allow_skips(tmp_path: Path) -> None:
    """Where CI is set and empty it stays so, and the stages see that."""
    done, stages = run_ci(tmp_path, broken="", ci="")

    assert done.returncode == 0, done.stdout + done.stderr
    assert stages == STAGES


@pytest.mark.parametrize("stage", sorted(set(STAGES) - {"setup", "tools"}))
def test_one_failing_stage_fails_the_run(tmp_path: Path, stage: str) -> None:
    """A stage that fails is named and fails the run, and the others still run."""
    done, stages = run_ci(tmp_path, broken=stage)

    assert done.returncode != 0
    assert stages == STAGES
    assert f"== ci: FAILED: {stage}" in done.stdout
    assert "== ci: ok" not in done.stdout


@pytest.mark.parametrize("stage", ["setup", "tools"])
def test_nothing_runs_without_set_up(tmp_path: Path, stage: str) -> None:
    """When set-up fails the run ends there, and fails."""
    done, stages = run_ci(tmp_path, broken=stage)

    assert done.returncode != 0
    assert stages == STAGES[: STAGES.index(stage) + 1]
    assert "== ci: FAILED: " in done.stdout


def test_the_report_tells_each_time(tmp_path: Path) -> None:
    """The closing table has a line with seconds for each stage, and a total."""
    done, _ = run_ci(tmp_path, broken="")
    table = done.stdout.split("in total\n")[1].splitlines()

    assert sum(" s  ok" in line for line in table) == len(STAGES)
