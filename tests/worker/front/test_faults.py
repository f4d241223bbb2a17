"""Faults that other runners had to mend, met in a real worker process.

The numbers are those of the table in docs/evidence/caches.md.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
import pytest_asyncio

from mlxd.v1 import inference_pb2, inference_pb2_grpc, status_pb2
from mlxd_shared import config
from mlxd_shared.domain.errors import InternalError
from mlxd_shared.wire.records import duration_from_pb
from tests.support.calls import error_of, greedy, ids
from tests.support.faulty_worker import FAULT
from tests.support.held_worker import HELD, LOCK_VARIABLE, steps_held
from tests.support.tiny_model import write_tiny_model
from tests.support.worker_process import WorkerProcess, running_worker

CONTEXT = 32_768
LONG = 1000


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with room for long streams."""
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), context_max=CONTEXT)


@pytest_asyncio.fixture
async def worker(folder: Path) -> AsyncIterator[WorkerProcess]:
    """A worker that is ready."""
    async with running_worker() as process:
        await process.load(folder)
        yield process


def account(status: status_pb2.WorkerStatus, name: str) -> int:
    """Return the bytes of one account."""
    return next(a.bytes for a in status.memory.accounts if a.name == name)


@pytest.mark.asyncio
async def test_a_client_that_never_reads_and_disconnects_stops_the_work(
    worker: WorkerProcess,
) -> None:
    """Fault 2: nobody takes a token, the connection goes; the row is free, the next is served."""
    before = await ids(worker)
    async with grpc.aio.insecure_channel(worker.address) as channel:
        stub: inference_pb2_grpc.InferenceServiceAsyncStub = (
            inference_pb2_grpc.InferenceServiceStub(channel)
        )
        call = stub.Generate(greedy())
        busy = await worker.until(lambda status: status.kv_tokens_used > LONG)
        assert busy.streams_running == 1
    assert call.done()

    freed = await worker.until(lambda status: status.streams_running == 0)
    assert freed.kv_tokens_used == account(await worker.sweep(), "kv") == 0
    assert await ids(worker) == before


@pytest.mark.asyncio
async def test_status_waits_for_no_step(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault 18: while one step of a prefill lasts, every status comes, with the age it has."""
    lock = tmp_path / "lock"
    lock.touch()
    monkeypatch.setenv(LOCK_VARIABLE, str(lock))
    async with running_worker(module="tests.support.held_worker") as worker:
        await worker.load(folder)
        with steps_held(lock):
            call = worker.inference.Generate(greedy(max_tokens=1))
            first = asyncio.ensure_future(anext(aiter(call)))
            while HELD not in worker.log:  # noqa: ASYNC110 - its log is no event
                await asyncio.sleep(0)
            # None of these could come if it waited for the step, which lasts until they have come.
            statuses = [await worker.own_status() for _ in range(4)]
            assert not first.done()
        ages_s = [duration_from_pb(status.figures_age) for status in statuses]
        assert ages_s == sorted(ages_s)
        assert ages_s[0] >= config.STATUS_WAIT_S
        assert len((await first).token_ids) == 1
        await worker.until(
            lambda status: (
                status.streams_running == 0 and duration_from_pb(status.figures_age) < ages_s[-1]
            )
        )


@pytest.mark.asyncio
async def test_a_fault_in_the_middle_of_a_stream_reaches_its_client(folder: Path) -> None:
    """Faults 21 and 42: tokens, then an error with an id; the log has the first cause's stack."""
    async with running_worker(module="tests.support.faulty_worker") as worker:
        await worker.load(folder)
        call = worker.inference.Generate(greedy())
        got = list((await anext(aiter(call))).token_ids)
        error = await error_of(call)
        await worker.wait_ended()

        assert got
        assert isinstance(error, InternalError)
        assert error.error_id in worker.log
        assert FAULT in worker.log
        assert "faulty_worker.py" in worker.log, "the stack of the fault itself"


@pytest.mark.asyncio
async def test_memory_is_what_is_held_now(worker: WorkerProcess) -> None:
    """Fault 23: the report follows what is allotted and freed, and estimates nothing."""
    idle = await worker.sweep()
    call = worker.inference.Generate(greedy())
    await anext(aiter(call))
    short = await worker.until(lambda status: status.kv_tokens_used > 0)
    long = await worker.until(
        lambda status: status.kv_tokens_used > LONG and account(status, "kv") > account(short, "kv")
    )
    call.cancel()
    kept = await worker.until(lambda status: status.streams_running == 0)
    freed = await worker.sweep()

    assert account(idle, "kv") == 0 < account(short, "kv")
    assert account(freed, "kv") == 0 < account(kept, "kv")
    for status in (idle, short, long, kept, freed):
        assert status.memory.total_bytes == sum(a.bytes for a in status.memory.accounts)
        assert status.memory.resident_bytes > status.memory.total_bytes
    assert account(idle, "weights") == account(long, "weights") == account(freed, "weights")


@pytest.mark.asyncio
async def test_cached_tokens_are_prompt_tokens(worker: WorkerProcess) -> None:
    """Fault 24: the count of a prompt is the whole prompt's, whatever part of it was reused."""
    prompt = inference_pb2.TokenIds(ids=[5 + n % 300 for n in range(LONG)])
    usages = []
    for _ in range(2):
        call = worker.inference.Generate(greedy(tokens=prompt, max_tokens=2))
        usages.append([message async for message in call][-1].usage)

    assert [usage.prompt_tokens for usage in usages] == [LONG, LONG]
    assert [usage.cached_tokens for usage in usages] == [0, LONG - 1]
    assert all(usage.total_tokens == LONG + 2 for usage in usages)
