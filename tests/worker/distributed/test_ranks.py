"""One model over ranks on a CPU: tokens as of one rank, and a group that ends as one."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import mlxd_shared
from mlxd_worker.process.exit_code import ExitCode
from tests.worker.fresh_process import environment

DEMO = Path(mlxd_shared.__file__).parent / "demo_model"
RUN_S = 500.0
"""Ranks wait for each other by turning: with more of them than processors a step takes long."""


def start(ranks: int, out: Path, *more: str) -> subprocess.Popen[str]:
    """Start mixed streams over so many ranks."""
    name = "tests.worker.distributed.rank_run"
    return subprocess.Popen(
        [sys.executable, "-m", name, str(ranks), str(out), str(DEMO), *more],
        env=environment(MLXD_BLAS_THREADS="1"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run_streams(ranks: int, out: Path, *more: str) -> Any:
    """Run to the end, and return what was written."""
    process = start(ranks, out, *more)
    _, errors = process.communicate(timeout=RUN_S)
    assert process.returncode == 0, errors
    return json.loads(out.read_text())


@pytest.mark.timeout(2 * RUN_S)
@pytest.mark.parametrize("ranks", [2, 4])
def test_tokens_are_those_of_one_rank(tmp_path: Path, ranks: int) -> None:
    """24 mixed streams draw what one process draws, but for one that is cancelled on the way."""
    alone, together = run_streams(1, tmp_path / "1"), run_streams(ranks, tmp_path / "many")
    assert not together["errors"]
    differ = {n for n in alone["ids"] if alone["ids"][n] != together["ids"][n]}
    assert differ <= {"3"}
    least = min(len(alone["ids"]["3"]), len(together["ids"]["3"]))
    assert alone["ids"]["3"][:least] == together["ids"]["3"][:least]


def test_a_rank_has_less_than_all(tmp_path: Path) -> None:
    """Layers are divided: one of two ranks holds well below what one process does."""
    alone, together = run_streams(1, tmp_path / "1"), run_streams(2, tmp_path / "2")
    assert together["nbytes"] < 0.65 * alone["nbytes"]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_follower_ends_the_group(tmp_path: Path, number: signal.Signals) -> None:
    """Where a follower dies or stands still, its leader ends by itself, before it is done."""
    process = start(2, tmp_path / "out", "7", "40", str(int(number)))
    assert process.stdout is not None
    assert "hit\n" in iter(process.stdout.readline, "")
    _, errors = process.communicate(timeout=RUN_S)
    assert process.returncode == ExitCode.ENGINE_FAILED, errors
    assert not (tmp_path / "out").exists()
