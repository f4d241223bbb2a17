"""What workers' figures tell the scheduler: weights, peak and process, when they have grown."""

from __future__ import annotations

from dataclasses import replace

from mlxd_controller.runtime.workers import NEWS_BYTES, figures_of, is_news
from mlxd_models.fit.measured import Figures
from mlxd_shared.config import MIB
from mlxd_shared.domain.figures import MemoryAccount, WorkerFigures, WorkerMemory


def make_figures(backend: str = "mlx-cpu", *, weights: int = 10 * MIB) -> WorkerFigures:
    """Return what a worker says that holds a model of `weights`."""
    memory = WorkerMemory(
        accounts=(MemoryAccount("weights", weights), MemoryAccount("kv", 3 * MIB)),
        mlx_active_nbytes=13 * MIB,
        mlx_cache_nbytes=2 * MIB,
        mlx_peak_nbytes=20 * MIB,
        resident_nbytes=115 * MIB,
    )
    return WorkerFigures(backend=backend, memory=memory)


def test_a_process_is_what_is_resident_beside_arrays() -> None:
    """On a CPU; on a GPU arrays are elsewhere, and nothing is said of the process."""
    assert figures_of(make_figures()) == Figures(weights=10 * MIB, peak=20 * MIB, process=100 * MIB)
    assert figures_of(make_figures("mlx-cuda-13")) == Figures(weights=10 * MIB, peak=20 * MIB)


def test_a_worker_without_a_model_says_nothing() -> None:
    """No weights, no figures."""
    assert figures_of(make_figures(weights=0)) is None


def test_only_growth_is_news() -> None:
    """The first figures are, and what has grown enough; less is none."""
    first = Figures(weights=10, peak=20 * MIB, process=100 * MIB)
    assert is_news(None, first)
    assert not is_news(first, replace(first, peak=first.peak + NEWS_BYTES - 1, process=1))
    assert is_news(first, replace(first, process=first.process + NEWS_BYTES))
    assert is_news(first, replace(first, weights=11))
