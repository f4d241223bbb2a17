"""Which MLX backend this worker runs on, found without importing MLX.

Compiling is off on the CPU unless asked for: there MLX runs g++ at the first use of every compiled
function, which needs a compiler that works, stalls a stream for a second, and gains a tenth.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from mlxd_shared.domain.devices import DeviceKind
from mlxd_shared.domain.errors import BackendProblem
from mlxd_shared.ops.backends import Installed, choose_backend, installed_versions
from mlxd_worker.machine.blas import preload_blas
from mlxd_worker.machine.blas_library import BlasReport

COMPILE_VARIABLE: Final = "MLXD_COMPILE"
MLX_COMPILE_VARIABLE: Final = "MLX_DISABLE_COMPILE"
COMPILER: Final = "g++"
COMPILER_TIMEOUT_S: Final = 60.0

_PROBE_SOURCE: Final = '#include <cmath>\nextern "C" float f(float x) { return std::exp(x); }\n'


@dataclass(frozen=True, slots=True)
class Backend(Installed):
    """What the worker runs on, for the log and the status."""

    compile_allowed: bool
    compile_reason: str
    blas: BlasReport


def compile_policy(
    kind: DeviceKind, environ: Mapping[str, str], compiler_works: Callable[[], str | None]
) -> tuple[bool, str]:
    """Return whether MLX may compile, and why.

    MLXD_COMPILE is auto (on for GPUs, off for the CPU), on or off. compiler_works returns what is
    wrong with the C++ compiler, or None; it is asked only where the answer matters.

    Raises:
        BackendProblem: MLXD_COMPILE is something else.
    """
    wish = environ.get(COMPILE_VARIABLE, "") or "auto"
    if wish not in {"auto", "on", "off"}:
        raise BackendProblem(f"{COMPILE_VARIABLE}={wish!r} is none of auto, on, off")
    if MLX_COMPILE_VARIABLE in environ:
        return False, f"{MLX_COMPILE_VARIABLE} is set"
    if wish == "off":
        return False, f"{COMPILE_VARIABLE}=off"
    if kind is not DeviceKind.CPU:
        return True, f"{kind.value} needs no C++ compiler"
    if wish == "auto":
        return False, "off on the CPU by default"
    problem = compiler_works()
    return problem is None, problem or f"{COMPILE_VARIABLE}=on and {COMPILER} works"


def compiler_problem() -> str | None:
    """Compile a small library as MLX would; return what is wrong, or None where it works."""
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch) / "probe.cpp"
        source.write_text(_PROBE_SOURCE, encoding="ascii")
        library = Path(scratch) / "probe.so"
        command = [COMPILER, "-std=c++17", "-fPIC", "-shared", str(source), "-o", str(library)]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=COMPILER_TIMEOUT_S, check=False
            )
        except FileNotFoundError:
            return f"no {COMPILER} on PATH"
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"{COMPILER} cannot be run: {error}"
    return f"{COMPILER} fails: {done.stderr.strip()[-300:]}" if done.returncode else None


def prepare_backend() -> Backend:
    """Make this process ready to import MLX; call it first, from the main thread.

    Chooses the backend, puts the BLAS under it, and turns MLX's compiling off where it is not
    allowed (that is read at the first compiled call and holds for every thread).

    Raises:
        BackendProblem: see `choose_backend`, `compile_policy` and `preload_blas`.
    """
    installed = choose_backend(installed_versions(), platform=sys.platform)
    allowed, reason = compile_policy(installed.kind, os.environ, compiler_problem)
    if not allowed:
        os.environ[MLX_COMPILE_VARIABLE] = "1"
    own = (installed.kind, installed.distribution, installed.version)
    return Backend(*own, compile_allowed=allowed, compile_reason=reason, blas=preload_blas())
