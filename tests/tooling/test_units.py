"""The system's unit and shell completion: well-formed, and about commands that exist.

Where systemd-analyze is missing its test skips.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mlxd_shared.config import SHUTDOWN_GRACE_S, WORKER_INTERRUPT_GRACE_S
from tests.tooling.command_line import parse_command

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "docs" / "deploy"
MLXD = Path(sys.executable).parent / "mlxd"
TIMEOUT_S = 60
OPTIONS = "--model . --memory-limit 12G"


def unit(key: str) -> list[str]:
    """The values of a key in the systemd unit."""
    lines = (DEPLOY / "mlxd.service").read_text(encoding="utf-8").splitlines()
    return [line.partition("=")[2] for line in lines if line.startswith(f"{key}=")]


def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    """systemd knows every setting and finds nothing to complain about."""
    if shutil.which("systemd-analyze") is None:
        pytest.skip("no systemd-analyze on this machine")
    copy = tmp_path / "mlxd.service"
    text = (DEPLOY / copy.name).read_text(encoding="utf-8")
    copy.write_text(text.replace("/opt/mlxd/bin/mlxd", str(MLXD)), encoding="utf-8")
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(copy)],
        capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
    )  # fmt: skip

    assert (done.returncode, done.stderr) == (0, "")


def test_the_unit_starts_a_real_command() -> None:
    """The server takes the unit's command with the options that the unit's comment shows."""
    (line,) = unit("ExecStart")
    program, *words = shlex.split(line.replace("$MLXD_OPTIONS", OPTIONS))

    assert program == "/opt/mlxd/bin/mlxd"
    assert parse_command(["mlxd", *words])["memory_limit"] == 12 << 30


def test_the_unit_waits_for_a_graceful_stop() -> None:
    """Nobody kills the server before streams and workers have had their time."""
    needs_s = SHUTDOWN_GRACE_S + WORKER_INTERRUPT_GRACE_S

    assert [float(text) for text in unit("TimeoutStopSec")] > [needs_s]


@pytest.mark.parametrize(
    ("typed", "word", "offered"),
    [("mlxd se", 1, "serve"), ("mlxd prot", 1, "protos"), ("mlxd load --wei", 2, "--weights")],
)
def test_the_shell_completes(typed: str, word: int, offered: str) -> None:
    """What `mlxd --install-completion` sets up answers bash with commands and options."""
    variables = {"_MLXD_COMPLETE": "complete_bash", "COMP_WORDS": typed, "COMP_CWORD": str(word)}
    done = subprocess.run(
        [str(MLXD)], env=os.environ | variables,
        capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
    assert offered in done.stdout.split()
