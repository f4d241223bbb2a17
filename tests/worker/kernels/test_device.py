"""One function tells what computes here; nobody else compares devices."""

from __future__ import annotations

import re
from pathlib import Path

import mlx.core as mx
import pytest

import mlxd_worker
from mlxd_worker.kernels.device import runs_cpu, runs_cuda

COMPARED = re.compile(r"default_device\(\)\s*[!=]=|[!=]=\s*mx\.default_device\(\)")


@pytest.fixture
def sources() -> dict[str, str]:
    """The text of every module of the worker, by its path."""
    root = Path(mlxd_worker.__file__).parent
    return {path.relative_to(root).as_posix(): path.read_text() for path in root.rglob("*.py")}


def test_a_device_is_a_cpu_or_runs_cuda_or_neither() -> None:
    """The default device decides, and what it is called is the proof."""
    assert runs_cpu() == ("cpu" in repr(mx.default_device()))
    assert not (runs_cpu() and runs_cuda())


def test_the_default_device_is_compared_in_one_place(sources: dict[str, str]) -> None:
    """Who must know whether a CPU computes calls `runs_cpu`."""
    comparing = [name for name, text in sources.items() if COMPARED.search(text)]

    assert comparing == ["kernels/device.py"]
