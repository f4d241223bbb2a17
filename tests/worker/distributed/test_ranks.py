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


@pytest.mark.timeout(3 * RUN_S)
def test_tokens_are_those_of_one_rank(tmp_path: Path) -> None:
    """24 mixed streams draw what one process draws, but for one that is cancelled on the way; and
    layers are divided: a rank of several holds well below what one process does.
    """
    alone = run_streams(1, tmp_path / "1")
    for ranks, share in ((2, 0.65), (4, 0.45)):
        together = run_streams(ranks, tmp_path / str(ranks))
        assert not together["errors"]
        differ = {n for n in alone["ids"] if alone["ids"][n] != together["ids"][n]}
        assert differ <= {"3"}
        least = min(len(alone["ids"]["3"]), len(together["ids"]["3"]))
        assert alone["ids"]["3"][:least] == together["ids"]["3"][:least]
        assert together["nbytes"] < share * alone["nbytes"]


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGKILL, ExitCode.RANK_KILLED), (signal.SIGSTOP, ExitCode.ENGINE_FAILED)],
)
def test_a_lost_follower_ends_the_group(
    tmp_path: Path, number: signal.Signals, code: ExitCode
) -> None:
    """Where a follower dies or stands still, its leader ends by itself, before it is done."""
    process = start(2, tmp_path / "out", "7", "20", str(int(number)))
    assert process.stdout is not None
    assert "hit\n" in iter(process.stdout.readline, "")
    _, errors = process.communicate(timeout=RUN_S)
    assert process.returncode == code, errors
    assert not (tmp_path / "out").exists()
