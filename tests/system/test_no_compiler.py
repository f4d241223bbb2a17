"""Nothing needs a C++ compiler: the demo and the engine's own tests run without one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.effort import spread_evenly
from tests.support.no_compiler import without_compiler
from tests.tidy.tree import ROOT

LIMIT_S = 500
"""Many times what it takes; the machine may have too much to do."""
pytestmark = pytest.mark.timeout(LIMIT_S + 10)
ENGINE_TESTS = spread_evenly(
    ("tests/worker/models/test_golden.py", "tests/worker/engine/sampling/test_sampler.py"), 1
)


def run(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python on such a machine."""
    fresh = without_compiler(tmp_path / "machine")
    assert shutil.which("g++", path=fresh["PATH"]) is None
    assert shutil.which("c++", path=fresh["PATH"]) is None
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("MLXD_", "PYTEST_"))}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=kept | fresh,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


def test_the_demo_needs_no_compiler(tmp_path: Path) -> None:
    """The demo streams its story, with the optimised BLAS made afresh and no kernel built."""
    done = run(tmp_path, "-m", "mlxd_controller.demo")
    assert done.returncode == 0, done.stderr
    assert "tokens/s" in done.stdout + done.stderr
    assert not list((tmp_path / "machine" / "tmpdir").rglob("*.so"))


def test_the_engines_tests_need_no_compiler(tmp_path: Path) -> None:
    """Parity, batching and sampling hold there as they do here."""
    options = ("-q", "-p", "no:cacheprovider", "--basetemp", str(tmp_path / "pytest"))
    done = run(tmp_path, "-m", "pytest", *options, *ENGINE_TESTS)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
