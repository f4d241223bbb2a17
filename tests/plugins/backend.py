"""Makes the test process ready to import MLX, as a worker is, and says on what it runs.

Where several test processes run side by side, each has its share of the cores for its BLAS, and so
have the workers that it starts: threads beyond that would only wait for each other, busily.
"""

from __future__ import annotations

import os

import pytest

from mlxd_worker.machine.backend import Backend, prepare_backend
from mlxd_worker.machine.blas import THREADS_VARIABLE
from mlxd_worker.machine.cores import available_cores

BACKEND = pytest.StashKey[Backend]()
PROCESSES_VARIABLE = "PYTEST_XDIST_WORKER_COUNT"


def pytest_configure(config: pytest.Config) -> None:
    """Put the BLAS under MLX before any test module imports it."""
    processes = int(os.environ.get(PROCESSES_VARIABLE, "1"))
    if processes > 1:
        os.environ.setdefault(THREADS_VARIABLE, str(max(available_cores() // processes, 1)))
    config.stash[BACKEND] = prepare_backend()


def pytest_report_header(config: pytest.Config) -> str:
    """Say which backend and which BLAS the figures below belong to."""
    backend = config.stash[BACKEND]
    blas = backend.blas
    return (
        f"mlx: {backend.distribution} {backend.version}, {blas.name} {blas.version} with "
        f"{blas.threads} threads ({blas.reason})"
    )
