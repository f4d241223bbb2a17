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

from mlxd_worker.machine.products import LIBRARY, NATIVE, source_digest
from tests.tidy.tree import ROOT

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="macOS brings Accelerate")

TIMEOUT_S = 120
HOOK = f"""
import json, sys
from pathlib import Path
sys.path.insert(0, {str(ROOT)!r})
import hatch_build
hatch_build.COMPILE_TIMEOUT_S = float(sys.argv[2])
print(json.dumps(hatch_build.compile_products(Path(sys.argv[1]))))
"""
FAKE_ZIG = """#!{shell}
test "$1 $2" = "cc -mcpu=baseline" || exit 3
test -d "$ZIG_GLOBAL_CACHE_DIR" || exit 4
shift 2
PATH={path} exec {compiler} "$@"
"""


def compile_in(folder: Path, *, limit_s: float = TIMEOUT_S, **variables: str) -> str | None:
    """Return why the hook could not compile the sources in `folder`, or None."""
    done = subprocess.run(
        [sys.executable, "-c", HOOK, str(folder), str(limit_s)],
        env={**os.environ, **variables}, capture_output=True, text=True, timeout=TIMEOUT_S,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    problem = json.loads(done.stdout)
    assert problem is None or isinstance(problem, str)
    return problem


def compile_without_compiler(folder: Path, index: Path) -> str | None:
    """Do the same where there is no compiler, and of all wheels only those in `index`."""
    where = str(index)
    return compile_in(folder, PATH=where, CC="", PIP_NO_INDEX="1", PIP_FIND_LINKS=where)


def write_script(path: Path, *lines: str) -> str:
    """Write a shell script; return its path."""
    path.write_text("\n".join(["#!/bin/sh", *lines, ""]), encoding="ascii")
    path.chmod(0o755)
    return str(path)


def write_zig_wheel(folder: Path) -> None:
    """Write a wheel that is called ziglang, whose compiler is this machine's."""
    tree = folder / "tree"
    (tree / "ziglang").mkdir(parents=True)
    about = tree / "ziglang-0.15.0.dist-info"
    about.mkdir()
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    assert compiler is not None
    text = FAKE_ZIG.format(shell="/bin/sh", path=os.environ["PATH"], compiler=compiler)
    zig = tree / "ziglang" / "zig"
    zig.write_text(text, encoding="ascii")
    zig.chmod(0o755)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: ziglang\nVersion: 0.15.0\n")
    (about / "WHEEL").write_text("Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
    (about / "RECORD").write_text("")
    with zipfile.ZipFile(folder / "ziglang-0.15.0-py3-none-any.whl", "w") as wheel:
        for path in (zig, *about.iterdir()):
            wheel.write(path, path.relative_to(tree))


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
    assert compile_in(sources) is None
    first = (sources / LIBRARY).stat()
    assert (sources / LIBRARY).read_bytes() != old
    assert compile_in(sources, CC="/nowhere/cc") is None
    assert (sources / LIBRARY).stat().st_ino == first.st_ino


def test_a_library_that_another_machine_built_is_built_anew(sources: Path) -> None:
    """Of the same sources, but nothing that can be loaded here: as in a tree that was moved."""
    foreign = b"\x7fELF" + source_digest(sources).encode()
    (sources / LIBRARY).write_bytes(foreign)
    assert compile_in(sources) is None
    assert (sources / LIBRARY).read_bytes() != foreign


def test_without_a_compiler_one_is_fetched(sources: Path, tmp_path: Path) -> None:
    """No `cc` on PATH: the one in a wheel compiles, for any processor of the kind."""
    index = tmp_path / "index"
    write_zig_wheel(index)
    assert compile_without_compiler(sources, index) is None
    assert source_digest(sources).encode() in (sources / LIBRARY).read_bytes()


def test_where_none_can_be_fetched_there_is_no_library(sources: Path, tmp_path: Path) -> None:
    """An index without a compiler fails no installation."""
    problem = compile_without_compiler(sources, tmp_path)
    assert problem is not None
    assert problem.startswith("no C compiler, and ziglang cannot be fetched: ")
    assert not (sources / LIBRARY).exists()


def test_a_compiler_that_fails_leaves_no_library(sources: Path, tmp_path: Path) -> None:
    """What it says is passed on; nothing half made, and nothing old, stays."""
    broken = write_script(tmp_path / "broken", "echo no such flag >&2", "exit 1")
    assert compile_in(sources, CC=broken) == f"{broken} fails: no such flag"
    assert {path.suffix for path in sources.iterdir()} == {".c", ".h"}


def test_what_cannot_be_loaded_is_not_kept(sources: Path, tmp_path: Path) -> None:
    """A compiler for another machine ends well and makes what no worker here could open."""
    cross = write_script(tmp_path / "cross", 'for last; do :; done; echo other > "$last"')
    problem = compile_in(sources, CC=cross)
    assert problem is not None
    assert problem.startswith("it cannot be loaded: ")
    assert {path.suffix for path in sources.iterdir()} == {".c", ".h"}


def test_a_compiler_that_does_not_end_is_ended(sources: Path, tmp_path: Path) -> None:
    """With what it has started: the open pipe of an orphan would be read to its end."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    slow = write_script(tmp_path / "slow", f"exec 3>{pipe}", "sleep 600 & wait")
    assert compile_in(sources, limit_s=2.0, CC=slow) == f"{slow} has not ended after 2.0 s"
    os.set_blocking(reader, True)
    with os.fdopen(reader, "rb", buffering=0) as ended:
        assert ended.read(1) == b""  # nobody has it open for writing


def test_a_tree_that_cannot_be_written_fails_nothing(sources: Path) -> None:
    """Neither a new library nor the end of an old one can be had there."""
    (sources / LIBRARY).unlink()
    (sources / LIBRARY).mkdir()
    problem = compile_in(sources)
    assert problem is not None
    assert LIBRARY in problem
    assert not [path for path in sources.iterdir() if path.name.startswith(".")]


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
