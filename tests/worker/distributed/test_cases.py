"""What ranks refuse leaves the group as it was; what goes wrong ends it, and soon."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import mlxd_shared
from mlxd_worker.process.exit_code import ExitCode
from tests.worker.fresh_process import environment

DEMO = Path(mlxd_shared.__file__).parent / "demo_model"
RUN_S = 120.0


def run_case(case: str, **environ: str) -> tuple[int, list[str], str]:
    """Return the exit code of a case, its lines, and what it said of errors."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.worker.distributed.case_run", case, str(DEMO)],
        env=environment(MLXD_BLAS_THREADS="1", **environ),
        capture_output=True,
        text=True,
        timeout=RUN_S,
        check=False,
    )
    return done.returncode, done.stdout.splitlines(), done.stderr


def test_refusals_leave_the_group_and_a_difference_ends_it() -> None:
    """A load that all refuse, a format whose mask takes too long, a stream that is too long for a
    frame: each its own error. A rank whose state is another than the leader's ends all.
    """
    code, lines, errors = run_case("refusals")
    assert len(lines) == 2, errors
    refused, streams = map(json.loads, lines)
    assert refused["load"] == "none: missing"
    assert "response_format.regex: takes too long to follow" in streams["slow"]
    assert "at most 4096" in streams["long"]
    assert streams["served"] == 4
    assert code == ExitCode.ENGINE_FAILED
    assert "its state is another than the leader's" in errors


def test_a_load_that_stands_still_ends_the_group() -> None:
    """Each step of a load has a limit."""
    code, lines, errors = run_case("stands")
    assert lines == ['"stands"'], errors
    assert code == ExitCode.ENGINE_FAILED
    assert "not over in time" in errors


def test_a_follower_that_ends_before_it_joins_ends_the_group() -> None:
    """Its leader does not begin to join, which nothing in Python could end."""
    code, _, errors = run_case("absent")
    assert code == ExitCode.ENGINE_FAILED, errors
    assert "rank 1 is gone" in errors


def test_an_engine_that_stops_is_no_fault() -> None:
    """Its followers end with the thread that made them, and nobody takes that for a loss."""
    code, lines, errors = run_case("leaves")
    assert (code, lines) == (0, ['"left"']), errors


def test_a_join_has_a_limit() -> None:
    """A leader that waits in MLX for a rank that never comes ends, and shows where it was."""
    code, _, errors = run_case("absent", MLXD_TEST_JOINS="1")
    assert code == 1, errors
    assert "Timeout" in errors
    assert "join_group" in errors
