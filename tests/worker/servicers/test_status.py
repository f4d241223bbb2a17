"""What a worker says of itself: each figure is where its reader looks for it."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

from mlxd_shared.domain.figures import (
    LoadProgress,
    MathLibrary,
    MemoryAccount,
    ModelState,
)
from mlxd_shared.domain.requests import KVFormat, LoadSpec
from mlxd_shared.ops.machine import this_machine
from mlxd_shared.serving.server import Health
from mlxd_worker.engine.request import Occupancy
from mlxd_worker.front.worker import Worker
from mlxd_worker.machine.backend import Backend
from mlxd_worker.machine.blas_library import BlasReport
from mlxd_worker.servicers.metrics import WorkerMetrics
from mlxd_worker.servicers.status import figures_of, memory_of, status_to_pb
from mlxd_worker.thread.facts import LoadJob
from tests.support.engine_threads import Started, figures_now, kind, running_engine, worker_on
from tests.support.tiny_model import write_tiny_model

BLAS = BlasReport("openblas", "0.3", "HASWELL", 2, "as asked")


@pytest_asyncio.fixture
async def started() -> AsyncIterator[Started]:
    """A running engine thread, stopped at the end."""
    async with running_engine() as running:
        yield running


def with_backend(worker: Worker, *, compiles: bool) -> Worker:
    """Return a worker on the same engine that says this of its backend."""
    backend = Backend(
        kind(), "mlx-cpu", "1.2", compile_allowed=compiles, compile_reason="", blas=BLAS
    )
    identity = replace(worker.identity, incarnation="i-7", address="unix:/w", backend=backend)
    return Worker(identity, worker.engine, Health(), stopping=asyncio.Event())


@pytest.mark.asyncio
async def test_a_worker_says_which_machine_it_is_on(started: Started) -> None:
    """Under the name that it was given, or the machine's own, with the memory that is there."""
    worker = worker_on(started)
    named = Worker(
        replace(worker.identity, machine=this_machine("node-7")),
        worker.engine,
        Health(),
        stopping=asyncio.Event(),
    )
    for each, machine in ((worker, this_machine()), (named, this_machine("node-7"))):
        figures = await figures_now(started.engine)
        status = status_to_pb(each, figures, WorkerMetrics(), model="")
        memory = status.host_memory
        assert (memory.machine_id, memory.machine) == (machine.id, machine.name)
        assert memory.total_bytes > memory.available_bytes > 0
        assert memory.resident_bytes > 0
        assert list(status.machines) == [memory]


@pytest.mark.parametrize("compiles", [True, False])
@pytest.mark.asyncio
async def test_a_worker_without_a_model(started: Started, *, compiles: bool) -> None:
    """Process, backend and age are told; nothing is said of a model."""
    worker = with_backend(worker_on(started), compiles=compiles)
    figures = replace(
        await figures_now(started.engine),
        at_s=time.monotonic() - 100,
        load=Occupancy(3, 2, 1.5, kv_tokens_used=70, kv_tokens_capacity=700),
    )

    own = figures_of(worker, figures)

    assert (own.pid, own.address, own.incarnation) == (os.getpid(), "unix:/w", "i-7")
    assert own.started_unix_s == worker.identity.started_s
    assert (own.backend, own.mlx_version, own.compiles) == ("mlx-cpu", "1.2", compiles)
    assert own.math_library == MathLibrary(BLAS.name, BLAS.version, 2, BLAS.reason)
    assert (own.state, own.last_error) == (ModelState.UNLOADED, "")
    assert own.progress == LoadProgress()
    assert (own.model_name, own.model_path, own.model_digest) == ("", "", "")
    assert (own.streams_running, own.streams_waiting, own.oldest_wait_s) == (3, 2, 1.5)
    assert (own.kv_tokens_used, own.kv_tokens_capacity) == (70, 700)
    assert own.age_s is not None
    assert 100 <= own.age_s < 160
    times = psutil.Process().cpu_times()
    assert 0 < own.cpu_s <= times.user + times.system
    assert (own.context_length, own.kv_format, own.sampling) == (0, None, None)


@pytest.mark.asyncio
async def test_figures_are_never_of_the_future(started: Started) -> None:
    """Figures that came in while the status was made are 0 s old."""
    figures = replace(await figures_now(started.engine), at_s=time.monotonic() + 100)

    assert figures_of(worker_on(started), figures).age_s == 0.0


@pytest.mark.asyncio
async def test_memory_adds_up(started: Started) -> None:
    """The device's bytes are those of all accounts; what MLX says stands beside them."""
    accounts = (MemoryAccount("weights", 100, 3), MemoryAccount("kv", 20, 2))
    figures = replace(
        await figures_now(started.engine),
        accounts=accounts,
        mlx_active_nbytes=130,
        mlx_cache_nbytes=7,
        mlx_peak_nbytes=150,
        unaccounted_nbytes=10,
    )

    memory = memory_of(figures, devices=("gpu1",), rss=999)

    assert (memory.accounts, memory.total_nbytes) == (accounts, 120)
    assert memory.devices == {"gpu1": 120}
    assert (memory.mlx_active_nbytes, memory.mlx_cache_nbytes) == (130, 7)
    assert (memory.mlx_peak_nbytes, memory.unaccounted_nbytes) == (150, 10)
    assert memory.resident_nbytes == 999


@pytest.mark.asyncio
async def test_a_status_is_of_the_model_that_is_asked_for(started: Started, tmp_path: Path) -> None:
    """By no name, its name or its digest there is one worker; by any other there is none."""
    worker = worker_on(started)
    spec = LoadSpec(context_length=64, rows_max=2)
    job = LoadJob(write_tiny_model(tmp_path / "tiny"), "tiny", "d" * 64, spec)
    async for _ in worker.load(job):
        pass
    figures, metrics = await figures_now(started.engine), WorkerMetrics()

    def of(model: str) -> int:
        return len(status_to_pb(worker, figures, metrics, model=model).workers)

    assert [of(model) for model in ("", "tiny", "d" * 64, "d" * 8, "other")] == [1, 1, 1, 0, 0]
    own, loaded = figures_of(worker, figures), worker.loaded
    assert loaded is not None
    assert (own.model_name, own.model_path) == ("tiny", str(job.path))
    assert (own.model_digest, own.state) == ("d" * 64, ModelState.READY)
    assert (own.context_length, own.rows_max) == (64, 2)
    assert own.context_length_max == loaded.context_length_max > 64
    assert (own.vocab_size, own.kv_format) == (loaded.vocab_size, KVFormat.MODEL)
    assert (own.weights, own.sampling) == (loaded.weights, loaded.sampling)
    assert own.prefix_cache_nbytes == loaded.prefix_cache_nbytes > 0
    assert own.memory.total_nbytes > 0
    await worker.unload()
    assert figures_of(worker, figures).context_length == 0
