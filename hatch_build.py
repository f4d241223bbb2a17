"""Builds the kernels for products of few rows into the wheel, where something can compile C.

`cc` (or what CC names) does it; where there is no C compiler on Linux, `ziglang`, a compiler in a
wheel, is asked for at build time. Without either, or with MLXD_BUILD_PRODUCTS=off, the wheel holds
no library, a worker multiplies with OpenBLAS alone, and its status says so.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

NATIVE = "worker/mlxd_worker/machine/native"
LIBRARY = "libmlxd_products.so"
FLAGS = ("-O3", "-std=gnu11", "-fPIC", "-shared", "-fvisibility=hidden", "-pthread")
MACHINES = ("x86_64", "aarch64")
COMPILE_TIMEOUT_S = 120
ZIG = "ziglang>=0.13,<0.18"


class BuildHook(BuildHookInterface[Any]):
    """Compiles before the wheel is put together, editable ones too."""

    def dependencies(self) -> list[str]:
        """Ask for a compiler where there is none."""
        return [] if not wants_kernels() or compiler() else [ZIG]

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
    library, digest = folder / LIBRARY, source_digest(folder)
    if library.exists() and digest.encode() in library.read_bytes():
        return None
    scratch = folder / f".{LIBRARY}.{os.getpid()}"
    problem = _compile(folder / "products.c", scratch, digest)
    if problem is None:
        scratch.replace(library)
    else:
        scratch.unlink(missing_ok=True)
        library.unlink(missing_ok=True)
    return problem


def _compile(source: Path, output: Path, digest: str) -> str | None:
    command = compiler()
    if command is None:
        if find_spec("ziglang") is None:
            return "no C compiler"
        command = [sys.executable, "-m", "ziglang", "cc"]
    define = f'-DSOURCE_DIGEST="{digest}"'
    line = [*command, *FLAGS, define, str(source), "-o", str(output)]
    try:
        done = subprocess.run(
            line, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{command[0]} cannot be run: {error}"
    return f"{command[0]} fails: {done.stderr.strip()[-300:]}" if done.returncode else None


def source_digest(folder: Path) -> str:
    """Return what `mlxd_worker.machine.products` compares the library with."""
    digest = hashlib.sha256()
    for path in sorted([*folder.glob("*.c"), *folder.glob("*.h")]):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:32]
