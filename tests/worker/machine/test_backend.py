"""Which backend a worker runs on, told without MLX, and that it runs where nothing can compile."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from mlxd_shared.domain.devices import DeviceKind
from mlxd_shared.domain.errors import BackendProblem
from mlxd_worker.machine.backend import compile_policy, compiler_problem
from tests.worker.fresh_process import environment, run

ROOT = Path(__file__).resolve().parents[3]
PREPARE = """
import json
from mlxd_shared.domain.errors import BackendProblem
from mlxd_worker.machine.backend import prepare_backend
try:
    backend = prepare_backend()
    answer = {"kind": backend.kind.value, "distribution": backend.distribution,
              "compile": backend.compile_allowed, "reason": backend.compile_reason}
except BackendProblem as error:
    answer = {"problem": str(error)}
"""
ACTIVATIONS = (
    PREPARE
    + """
import math, threading
import mlx.core as mx, mlx.nn as nn

def compute():
    x = mx.array([-1.0, 0.0, 2.0])
    square = mx.compile(lambda v: mx.exp(v) * 2 + v)
    answer["silu"] = nn.silu(x).tolist()
    answer["gelu"] = nn.gelu(x).tolist()
    answer["compiled"] = square(x).tolist()

thread = threading.Thread(target=compute)
thread.start()
thread.join()
"""
)
TELL = "\nprint(json.dumps(answer))\n"


@pytest.mark.parametrize(
    ("kind", "environ", "problem", "allowed"),
    [
        (DeviceKind.CPU, {}, None, False),
        (DeviceKind.CPU, {"MLXD_COMPILE": "auto"}, None, False),
        (DeviceKind.CPU, {"MLXD_COMPILE": "on"}, None, True),
        (DeviceKind.CPU, {"MLXD_COMPILE": "on"}, "no g++ on PATH", False),
        (DeviceKind.CPU, {"MLXD_COMPILE": "on", "MLX_DISABLE_COMPILE": ""}, None, False),
        (DeviceKind.CUDA, {}, "no g++ on PATH", True),
        (DeviceKind.METAL, {}, "no g++ on PATH", True),
        (DeviceKind.CUDA, {"MLXD_COMPILE": "off"}, None, False),
        (DeviceKind.CUDA, {"MLX_DISABLE_COMPILE": "1"}, None, False),
    ],
)
def test_compiling_is_allowed_where_it_works_and_is_wanted(
    kind: DeviceKind, environ: dict[str, str], problem: str | None, *, allowed: bool
) -> None:
    """GPUs compile by default; the CPU only if asked to and with a compiler that works."""
    decided, reason = compile_policy(kind, environ, lambda: problem)
    assert decided is allowed
    assert reason


def test_a_malformed_compile_wish_is_an_error() -> None:
    """A value of MLXD_COMPILE that means nothing is refused with those that do."""
    with pytest.raises(BackendProblem, match="auto, on, off"):
        compile_policy(DeviceKind.CPU, {"MLXD_COMPILE": "1"}, lambda: None)


def write_program(folder: Path, text: str) -> None:
    """Put a shell script named g++ into `folder`."""
    program = folder / "g++"
    program.write_text(f"#!/bin/sh\n{text}\n", encoding="ascii")
    program.chmod(0o755)


def test_a_compiler_is_judged_by_what_it_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A compiler that is there but cannot compile is as good as none, and its words are kept."""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert compiler_problem() == "no g++ on PATH"
    write_program(tmp_path, 'echo "no cmath" >&2; exit 1')
    assert compiler_problem() == "g++ fails: no cmath"
    write_program(tmp_path, "exit 0")
    assert compiler_problem() is None
    (tmp_path / "g++").write_bytes(b"\x00no program")
    assert "cannot be run" in (compiler_problem() or "")


def bare_environment(tmp_path: Path, *distributions: str) -> dict[str, str]:
    """Return the environment of a Python that has our code and the named distributions, no more."""
    for name in distributions:
        info = tmp_path / f"{name.replace('-', '_')}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Name: {name}\nVersion: 1.0\n", encoding="ascii")
    places = [ROOT / "worker", ROOT / "shared", tmp_path]
    return environment(PYTHONPATH=":".join(map(str, places)))


@pytest.mark.skipif(sys.platform != "linux", reason="names Linux's backends")
@pytest.mark.parametrize(
    ("distributions", "words"),
    [
        ([], "MLX is not installed"),
        (["mlx"], "without a backend"),
        (["mlx", "mlx-cpu", "mlx-cuda-13"], "mlx-cpu and mlx-cuda-13"),
    ],
)
def test_a_real_process_without_one_backend_says_so(
    tmp_path: Path, distributions: list[str], words: str
) -> None:
    """A Python with no backend installed, or two, fails with the reason before it imports MLX."""
    answer = run(PREPARE + TELL, bare_environment(tmp_path, *distributions), "-S")
    assert words in answer["problem"]


@pytest.mark.parametrize("compiler", ["", "exit 1", "[ $1 = --version ] || exit 1"])
@pytest.mark.parametrize("wish", ["auto", "on"])
def test_a_worker_runs_without_a_working_compiler(tmp_path: Path, compiler: str, wish: str) -> None:
    """Functions that MLX compiles work on any thread without compiler and kernel cache."""
    if compiler:
        write_program(tmp_path, compiler)
    kernels = tmp_path / "tmp"
    kernels.mkdir()
    environ = environment(PATH=tmp_path, TMPDIR=kernels, MLXD_COMPILE=wish)
    answer = run(ACTIVATIONS + TELL, environ)
    if answer["kind"] == "cpu":
        assert answer["compile"] is False
        assert not (kernels / "mlx").exists()
    assert answer["silu"] == pytest.approx([-0.268941, 0.0, 1.761594], abs=1e-5)
    assert answer["gelu"] == pytest.approx([-0.158655, 0.0, 1.954500], abs=1e-5)
    assert answer["compiled"] == pytest.approx([-0.264241, 2.0, 16.778112], abs=1e-4)
