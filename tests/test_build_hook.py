"""What an installation compiles, and what it does where it cannot."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from mlxd_worker.machine.products import LIBRARY, NATIVE
from tests.tidy.tree import ROOT

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="macOS brings Accelerate")

TIMEOUT_S = 120
HOOK = f"""
import json, sys
from pathlib import Path
sys.path.insert(0, {str(ROOT)!r})
import hatch_build
folder = Path(sys.argv[1])
hook = hatch_build.BuildHook(".", {{}}, None, None, "", "wheel")
print(json.dumps([hook.dependencies(), hatch_build.compile_products(folder)]))
"""


def compile_in(folder: Path, **variables: str) -> tuple[list[str], str | None]:
    """Return what the hook asks for, and why it could not compile the sources in `folder`."""
    done = subprocess.run(
        [sys.executable, "-c", HOOK, str(folder)],
        env={**os.environ, **variables}, capture_output=True, text=True, timeout=TIMEOUT_S,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    needed, problem = json.loads(done.stdout)
    return needed, problem


@pytest.fixture(name="sources")
def copy_sources(tmp_path: Path) -> Path:
    """A copy of the sources, changed since the library beside them was built."""
    copy = shutil.copytree(NATIVE, tmp_path / "native")
    with (copy / "pool.h").open("a", encoding="ascii") as file:
        file.write("/* newer */\n")
    return copy


def test_a_library_is_built_anew_when_its_sources_change(sources: Path) -> None:
    """And once: the same sources keep the file that is there."""
    old = (sources / LIBRARY).read_bytes()
    assert compile_in(sources) == ([], None)
    first = (sources / LIBRARY).stat()
    assert (sources / LIBRARY).read_bytes() != old
    assert compile_in(sources, CC="/nowhere/cc") == ([], None)
    assert (sources / LIBRARY).stat().st_ino == first.st_ino


def test_without_a_compiler_one_is_asked_for_and_done_without(
    sources: Path, tmp_path: Path
) -> None:
    """No `cc` on PATH: the build asks for one in a wheel, and without that leaves no library."""
    needed, problem = compile_in(sources, PATH=str(tmp_path), CC="")
    assert [name.partition(">")[0] for name in needed] == ["ziglang"]
    assert problem == "no C compiler"
    assert not (sources / LIBRARY).exists()


def test_a_compiler_that_fails_leaves_no_library(sources: Path, tmp_path: Path) -> None:
    """What it says is passed on; nothing half made, and nothing old, stays."""
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\necho no such flag >&2\nexit 1\n", encoding="ascii")
    broken.chmod(0o755)
    needed, problem = compile_in(sources, CC=str(broken))
    assert not needed
    assert problem == f"{broken} fails: no such flag"
    assert {path.suffix for path in sources.iterdir()} == {".c", ".h"}


def test_kernels_can_be_declined(sources: Path) -> None:
    """MLXD_BUILD_PRODUCTS=off asks for no compiler, whatever there is."""
    needed, _ = compile_in(sources, PATH="/nowhere", CC="", MLXD_BUILD_PRODUCTS="off")
    assert not needed


@pytest.mark.parametrize("declined", [False, True])
def test_the_wheel_is_its_platforms_with_kernels_and_anyones_without(
    tmp_path: Path, *, declined: bool
) -> None:
    """Any Python's wheel either way, and its name says whether it holds machine code."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    word = "off" if declined else ""
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "MLXD_BUILD_PRODUCTS": word}, capture_output=True,
        text=True, timeout=TIMEOUT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.iterdir()
    names = zipfile.ZipFile(wheel).namelist()
    here = f"py3-none-linux_{platform.machine()}.whl"
    assert wheel.name.endswith("py3-none-any.whl" if declined else here)
    assert (f"mlxd_worker/machine/native/{LIBRARY}" in names) is not declined
    assert "mlxd_worker/machine/native/products.c" in names
