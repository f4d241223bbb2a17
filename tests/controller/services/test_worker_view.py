"""A worker as its status shows it: what is counted never falls, and to look changes nothing."""

from __future__ import annotations

import os

import pytest

from mlxd_controller.runtime.worker import Worker
from mlxd_controller.services.views import worker_to_pb
from mlxd_models.fit.planner import plan_load
from mlxd_shared.domain.figures import WorkerFigures, WorkerMemory
from mlxd_shared.domain.requests import LoadSpec
from tests.fakes.workers import FakeProcess
from tests.fakes.world import FakeClock
from tests.support.model_facts import device, facts


def a_worker(**options: object) -> Worker:
    """Return one that has been launched."""
    plan = plan_load(facts(10), LoadSpec(), device(1 << 14))
    return Worker(1, "d", "m", "/m", plan, "i-1", 0.0, **options)  # type: ignore[arg-type]


def test_to_look_at_a_worker_changes_nothing() -> None:
    """Whoever asks for a status twice is told the same twice, of a worker that is as it was."""
    worker = a_worker()
    worker.note_figures(WorkerFigures(cpu_s=2.0, age_s=1.0), 0.0)
    before = repr(worker)
    clock = FakeClock()
    first = worker_to_pb(worker, None, clock)

    assert worker_to_pb(worker, None, clock) == first
    assert repr(worker) == before


def test_cpu_time_is_the_most_that_was_ever_said() -> None:
    """A counter: figures that come late, or after the process has gone, take nothing back."""
    worker = a_worker()
    for cpu_s in (2.0, 5.0, 3.0):
        worker.note_figures(WorkerFigures(cpu_s=cpu_s), 0.0)

    assert worker_to_pb(worker, None, FakeClock()).cpu_seconds == 5.0


@pytest.mark.asyncio
@pytest.mark.parametrize("local", [True, False])
async def test_the_system_tells_of_processes_of_this_machine_alone(*, local: bool) -> None:
    """There it knows better than the worker; of a worker elsewhere its own word is taken."""
    worker = a_worker(process=FakeProcess(os.getpid(), "i-1"), local=local)
    worker.note_figures(WorkerFigures(memory=WorkerMemory(resident_nbytes=7)), 0.0)
    worker.note_process()
    shown = worker_to_pb(worker, None, FakeClock())

    assert (shown.memory.resident_bytes > 7) is local
    assert (shown.cpu_seconds > 0) is local


@pytest.mark.asyncio
async def test_what_the_system_said_of_a_process_ends_with_it() -> None:
    """What it held is given back; what it took stays counted."""
    process = FakeProcess(os.getpid(), "i-1")
    worker = a_worker(process=process)
    worker.note_process()
    process.end(-9)
    worker.note_process()
    shown = worker_to_pb(worker, None, FakeClock())

    assert (worker.resident_nbytes, shown.memory.resident_bytes, shown.exit_code) == (None, 0, -9)
    assert shown.cpu_seconds > 0
