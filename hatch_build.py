"""Builds the kernels for products of few rows into the wheel, where something can compile C.

`cc` (or what CC names) does it; where there is no C compiler on Linux, `ziglang`, a compiler in a
wheel, is fetched for the time of the build. Without either, or with MLXD_BUILD_PRODUCTS=off, the
wheel holds no library, a worker multiplies with OpenBLAS alone, and its status says so.

Invariants
- Nothing that goes wrong here fails an installation, and each step has a time limit. This is why
  `ziglang` is no build requirement: pip fails where its index does not have one.
- What is put into a wheel can be loaded where it was built, and runs on older processors.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

NATIVE = "worker/mlxd_worker/machine/native"
LIBRARY = "libmlxd_products.so"
FLAGS = ("-O3", "-std=gnu11", "-fPIC", "-shared", "-fvisibility=hidden", "-pthread")
MACHINES = ("x86_64", "aarch64")
COMPILE_TIMEOUT_S = 40
FETCH_TIMEOUT_S = 30
ZIG = "ziglang>=0.13,<0.18"
ZIG_FLAGS = ("cc", "-mcpu=baseline")  # it takes the build machine's own instructions otherwise


class BuildHook(BuildHookInterface[Any]):
    """Compiles before the wheel is put together, editable ones too."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:  # noqa: ARG002
        """Compile, and mark the wheel as this platform's where that worked."""
        if self.target_name != "wheel" or not wants_kernels():
            return
        folder = Path(self.root) / NATIVE
        problem = compile_products(folder)
        if problem is not None:
            self.app.display_warning(f"no kernels for products of few rows: {problem}")
            return
        build_data["artifacts"].append(f"/{NATIVE}/{LIBRARY}")
        build_data["pure_python"] = False
        tag = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["tag"] = f"py3-none-{tag}"


def wants_kernels() -> bool:
    """Return whether this platform has kernels, and nobody has said that it shall have none."""
    here = sys.platform == "linux" and platform.machine() in MACHINES
    return here and os.environ.get("MLXD_BUILD_PRODUCTS", "") != "off"


def compiler() -> list[str] | None:
    """Return the command of a C compiler on this machine, or None."""
    for words in (shlex.split(os.environ.get("CC", "")), ["cc"], ["gcc"], ["clang"]):
        if words and shutil.which(words[0]):
            return words
    return None


def compile_products(folder: Path) -> str | None:
    """Make the library in `folder` unless it is there; return why it could not be, or None.

    A process that has an old one open keeps it: the new one is renamed into its place. An old one
    goes where no new one can be made.
    """
    library, scratch = folder / LIBRARY, folder / f".{LIBRARY}.{os.getpid()}"
    try:
        digest = source_digest(folder)
        if library.exists() and digest.encode() in library.read_bytes() and not _fault(library):
            return None  # else of other sources, or of another machine
        problem = _compile(folder / "products.c", scratch, digest) or _fault(scratch)
        if problem is None:
            scratch.replace(library)
            return None
    except OSError as error:
        problem = str(error)
    for path in (scratch, library):
        with suppress(OSError):  # of a read-only tree; a worker does not open an old one
            path.unlink(missing_ok=True)
    return problem


def _compile(source: Path, output: Path, digest: str) -> str | None:
    arguments = [*FLAGS, f'-DSOURCE_DIGEST="{digest}"', str(source), "-o", str(output)]
    command = compiler()
    if command is not None:
        return _run([*command, *arguments], COMPILE_TIMEOUT_S)
    with TemporaryDirectory(prefix="mlxd-zig-", ignore_cleanup_errors=True) as folder:
        pip = [sys.executable, "-I", "-m", "pip", "install", "--quiet", "--no-deps", "--retries=0"]
        problem = _run([*pip, "--only-binary=:all:", "--target", folder, ZIG], FETCH_TIMEOUT_S)
        if problem is not None:
            return f"no C compiler, and ziglang cannot be fetched: {problem}"
        command = [str(Path(folder, "ziglang", "zig")), *ZIG_FLAGS]
        return _run([*command, *arguments], COMPILE_TIMEOUT_S, ZIG_GLOBAL_CACHE_DIR=folder)


def _run(line: list[str], timeout_s: float, **variables: str) -> str | None:
    """Run a command; return why it failed, or None. What it started ends with it."""
    try:
        with subprocess.Popen(
            line, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, errors="replace",
            env={**os.environ, **variables}, start_new_session=True,
        ) as process:  # fmt: skip
            try:
                _, words = process.communicate(timeout=timeout_s)
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
    except subprocess.TimeoutExpired:
        return f"{line[0]} has not ended after {timeout_s} s"
    except OSError as error:
        return f"{line[0]} cannot be run: {error}"
    return f"{line[0]} fails: {words.strip()[-300:]}" if process.returncode else None


def _fault(library: Path) -> str | None:
    """Return why a library cannot be loaded here, or None."""
    try:
        ctypes.CDLL(str(library))
    except OSError as error:
        return f"it cannot be loaded: {error}"
    return None


def source_digest(folder: Path) -> str:
    """Return what `mlxd_worker.machine.products` compares the library with."""
    digest = hashlib.sha256()
    for path in sorted([*folder.glob("*.c"), *folder.glob("*.h")]):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:32]
