"""However a stream's client goes, its row is free after one more step, counted at the socket."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
import pytest_asyncio

from mlxd.v1 import inference_pb2, inference_pb2_grpc, status_pb2, types_pb2, worker_pb2
from mlxd_shared.security.net import CHANNEL_OPTIONS
from tests.support.stepped_worker import PIPE_VARIABLE, steps_taken
from tests.support.tiny_model import write_tiny_model
from tests.support.worker_process import WorkerProcess, running_worker

CONTEXT = 4096
PROMPT = 3000
"""Several chunks: six where nobody decodes."""
STEPS_BEFORE = 2
DEADLINE_S = 5.0
"""Comes after the steps before it, even where the machine stands still for a while."""

Response = inference_pb2.GenerateResponse
Call = grpc.aio.UnaryStreamCall[inference_pb2.GenerateRequest, Response]


@dataclass(slots=True)
class Stepped:
    """A worker whose steps the test gives out."""

    worker: WorkerProcess
    pipe: int

    def give(self, steps: int) -> None:
        """Let the worker do so many more steps, once it has something to do."""
        os.write(self.pipe, b"." * steps)

    @property
    def taken(self) -> int:
        """Steps that are over."""
        return steps_taken(self.worker.log)

    async def until(self, holds: Callable[[], bool]) -> None:
        """Wait for something that comes with the worker's own doing."""
        await self.worker.until(lambda _: holds())

    async def settle(self) -> None:
        """Have the engine's thread answer; what was sent to it before is done then."""
        await self.worker.control.Shrink(
            worker_pb2.ShrinkRequest(
                worker_incarnation=self.worker.incarnation, target_bytes=1 << 50
            )
        )

    async def count_left(self) -> int:
        """Return how many calls the worker's event loop has seen end without being complete."""
        got = await self.worker.status.GetStatus(status_pb2.GetStatusRequest())
        return sum(
            int(point.value)
            for family in got.status.metrics
            if family.name == "mlxd_requests_total"
            for point in family.points
            if point.labels["code"] != "OK"
        )


@pytest_asyncio.fixture
async def stepped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Stepped]:
    """A worker with a tiny model; no step is given out yet."""
    path = tmp_path / "steps"
    os.mkfifo(path)
    pipe = os.open(path, os.O_RDWR)
    monkeypatch.setenv(PIPE_VARIABLE, str(path))
    folder = write_tiny_model(tmp_path / "tiny", context_max=CONTEXT)
    async with running_worker(
        "--log-format", "json", module="tests.support.stepped_worker"
    ) as worker:
        await worker.load(folder, rows_max=2)
        its = Stepped(worker, pipe)
        yield its
        its.give(10_000)  # whatever is left, and the end
    os.close(pipe)


def request_of(length: int) -> inference_pb2.GenerateRequest:
    """Return a greedy request that goes on until the context is full."""
    return inference_pb2.GenerateRequest(
        tokens=inference_pb2.TokenIds(ids=[3 + n % 300 for n in range(length)]),
        sampling=types_pb2.SamplingOptions(temperature=0),
        ignore_eos=True,
        num_predict=0,
    )


async def _wait_gone(call: Call) -> None:
    """Wait until the call has ended for its client."""
    await call.code()


@pytest.mark.asyncio
@pytest.mark.parametrize("length", [PROMPT, 5], ids=["in its prefill", "decoding"])
@pytest.mark.parametrize("how", ["cancel", "disconnect", "deadline"])
async def test_a_stream_whose_client_has_gone_takes_one_more_step(
    stepped: Stepped, how: str, length: int
) -> None:
    """At most one chunk, one step, is done for it after the worker's event loop knows."""
    worker = stepped.worker
    async with grpc.aio.insecure_channel(worker.address, options=list(CHANNEL_OPTIONS)) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        timeout_s = DEADLINE_S if how == "deadline" else None
        call: Call = stub.Generate(request_of(length), timeout=timeout_s)
        stepped.give(STEPS_BEFORE)
        await stepped.until(lambda: stepped.taken == STEPS_BEFORE)
        if how == "cancel":
            call.cancel()
        elif how == "disconnect":
            await channel.close()
        await _wait_gone(call)
    while not await stepped.count_left():
        pass
    assert stepped.taken == STEPS_BEFORE

    stepped.give(10)
    for _ in range(3):  # each is served between two steps, after the cancel
        await stepped.settle()

    status = await worker.fresh_status()
    assert (status.streams_running, status.kv_tokens_used) == (0, 0)
    swept = await worker.sweep()
    assert {a.name: a.bytes for a in swept.memory.accounts}["kv"] == 0
    assert stepped.taken == STEPS_BEFORE + 1
