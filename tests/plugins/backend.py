"""Makes the test process ready to import MLX, as a worker is, and says on what it runs."""

from __future__ import annotations

import pytest

from mlxd_worker.machine.backend import Backend, prepare_backend

BACKEND = pytest.StashKey[Backend]()


def pytest_configure(config: pytest.Config) -> None:
    """Put the BLAS under MLX before any test module imports it."""
    config.stash[BACKEND] = prepare_backend()


def pytest_report_header(config: pytest.Config) -> str:
    """Say which backend and which BLAS the figures below belong to."""
    backend = config.stash[BACKEND]
    blas = backend.blas
    return (
        f"mlx: {backend.distribution} {backend.version}, {blas.name} {blas.version} with "
        f"{blas.threads} threads ({blas.reason})"
    )
