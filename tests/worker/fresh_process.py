"""Runs a few lines in a Python of their own: what comes before importing MLX happens once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

TIMEOUT_S = 120.0
UNSET = (
    "MLXD_BLAS",
    "MLXD_BLAS_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MLXD_COMPILE",
    "MLX_DISABLE_COMPILE",
    "LD_PRELOAD",
)


def environment(**changes: str | Path) -> dict[str, str]:
    """Return this process's environment without what steers BLAS and compiling, then changed."""
    kept = {name: value for name, value in os.environ.items() if name not in UNSET}
    return kept | {name: str(value) for name, value in changes.items()}


def start(code: str, environ: Mapping[str, str], *options: str) -> subprocess.Popen[str]:
    """Start Python on `code`, which prints one JSON value as its last line."""
    return subprocess.Popen(
        [sys.executable, *options, "-c", code],
        env=dict(environ),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def result(process: subprocess.Popen[str]) -> Any:
    """Wait for a started process and return what it printed."""
    try:
        output, errors = process.communicate(timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise
    assert process.returncode == 0, errors
    return json.loads(output.strip().splitlines()[-1])


def run(code: str, environ: Mapping[str, str], *options: str) -> Any:
    """Run `code` and return what it printed."""
    return result(start(code, environ, *options))
