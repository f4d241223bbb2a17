"""What ranks refuse leaves the group as it was; what goes wrong ends it, and soon."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import mlxd_shared
from mlxd_worker.process.exit_code import ExitCode
from tests.worker.fresh_process import environment

DEMO = Path(mlxd_shared.__file__).parent / "demo_model"
RUN_S = 120.0
END_S = 30.0
"""Well below what ranks have to meet."""
HELD = """
import signal, sys
if "--rank" in sys.orig_argv:
    print("held", file=sys.stderr, flush=True)
    while True:
        signal.pause()
"""
"""Keeps a follower from all that it would do."""


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
    frame: each its own error. The largest targets of a shrink give nothing back. A rank whose state
    is another than the leader's ends all.
    """
    code, lines, errors = run_case("refusals")
    assert len(lines) == 3, errors
    refused, shrunk, streams = map(json.loads, lines)
    assert len(shrunk) == 3
    assert all(before == after > 0 for before, after in shrunk)
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


def test_a_stop_s_signals_end_no_follower_that_has_just_begun() -> None:
    """They may go to all processes at once; the leader alone obeys, and its followers with it."""
    code, lines, errors = run_case("early")
    assert (code, lines) == (0, ['"met"']), errors


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_leader_is_stopped_before_its_ranks_meet(tmp_path: Path, number: signal.Signals) -> None:
    """It ends well, and soon: not only once all are there, or were to be."""
    (tmp_path / "sitecustomize.py").write_text(HELD)
    process = subprocess.Popen(
        [sys.executable, "-m", "mlxd_worker", "--ranks", "2", "--listen", f"unix:{tmp_path}/s"],
        env=environment(PYTHONPATH=tmp_path),
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    with process:
        try:
            assert "held\n" in iter(process.stderr.readline, "")
            process.send_signal(number)
            errors = process.stderr.read()  # its follower, which writes there, has ended, too
            assert process.wait(END_S) == ExitCode.OK, errors
            assert "cannot start" not in errors
            assert "failed" not in errors
        finally:
            process.kill()


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
