"""ReadLogs over real gRPC with fake workers: what is sent, followed, missed and refused."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from mlxd.v1 import model_pb2
from mlxd_controller.core import phases
from mlxd_shared.config import LINES_KEPT_MAX, LOG_READERS_MAX
from mlxd_shared.domain.errors import (
    InvalidRequest,
    ModelLoading,
    ModelNotFound,
    QueueFull,
    WorkerExited,
)
from mlxd_shared.wire.status import from_call
from tests.support.calls import error_of
from tests.support.controller_stack import Stack, controller_stack, request

LIMIT_S = 30.0


def ask(stack: Stack, model: str = "a", **fields: Any) -> Any:
    """Begin to read a log."""
    return stack.models.ReadLogs(model_pb2.ReadLogsRequest(model=model, **fields))


async def read(stack: Stack, model: str = "a", **fields: Any) -> list[str]:
    """Return all lines of a log."""
    return [line async for message in ask(stack, model, **fields) for line in message.lines]


async def write(stack: Stack, *lines: str) -> None:
    """Have a worker of the model write."""
    if not stack.workers.launcher.processes:
        await stack.generate()
    for line in lines:
        stack.workers.launcher.processes[-1].output.add(line)


@pytest.mark.asyncio
async def test_the_last_lines_are_sent_and_the_stream_ends() -> None:
    """All that are kept, as many as are asked for, or none; with the worker that wrote them."""
    async with controller_stack() as stack:
        await write(stack, "one", "two", "three")
        (message,) = [message async for message in ask(stack)]
        process = stack.workers.launcher.processes[0]
        assert list(message.lines) == ["one", "two", "three"]
        assert (message.pid, message.worker_incarnation) == (process.pid, process.incarnation)
        assert await read(stack, tail=2) == ["two", "three"]
        assert await read(stack, tail=0) == []
        assert await read(stack, tail=LINES_KEPT_MAX) == ["one", "two", "three"]


@pytest.mark.asyncio
async def test_a_reader_follows_to_the_worker_s_end() -> None:
    """Line by line as they come, and no further than that worker."""
    async with controller_stack() as stack, asyncio.timeout(LIMIT_S):
        await write(stack, "one", "two")
        call = ask(stack, tail=1, follow=True)
        assert list((await call.read()).lines) == ["two"]
        await write(stack, "three")
        assert list((await call.read()).lines) == ["three"]
        stack.workers.launcher.processes[0].output.add("last words")
        stack.workers.launcher.processes[0].end(-9)
        assert list((await call.read()).lines) == ["last words"]
        assert await call.read() is grpc.aio.EOF


@pytest.mark.asyncio
async def test_long_logs_come_in_messages_of_a_bounded_size() -> None:
    """Nothing is lost between them."""
    lines = [f"{number} {'x' * 4000}" for number in range(100)]
    async with controller_stack() as stack:
        await write(stack, *lines)
        messages = [message async for message in ask(stack)]
        assert len(messages) > 1
        assert [line for message in messages for line in message.lines] == lines
        assert max(message.ByteSize() for message in messages) < 68 * 1024


@pytest.mark.asyncio
async def test_a_slow_reader_learns_what_it_missed() -> None:
    """The lines that were dropped before it read them are counted."""
    async with controller_stack() as stack, asyncio.timeout(LIMIT_S):
        await write(stack, "one")
        call = ask(stack, follow=True)
        assert list((await call.read()).lines) == ["one"]
        await write(stack, *(str(number) for number in range(LINES_KEPT_MAX + 5)))
        message = await call.read()
        assert (message.missed_lines, message.lines[0]) == (5, "5")
        call.cancel()


@pytest.mark.asyncio
async def test_the_log_of_a_worker_that_failed_stays_for_a_while() -> None:
    """Of one that served, and of one that never listened; a new one goes before it."""
    async with controller_stack() as stack:
        await write(stack, "a crash")
        stack.workers.launcher.processes[0].end(-11)
        await stack.until("a", phases.Failed)
        assert await read(stack) == ["a crash"]
        await stack.generate()
        await write(stack, "fine")
        assert await read(stack) == ["fine"]
    async with controller_stack() as stack:
        stack.workers.launcher.failure = WorkerExited("a", ("no such", "library"), 1)
        assert isinstance(await error_of(stack.inference.Generate(request())), WorkerExited)
        assert await read(stack, tail=1) == ["library"]


@pytest.mark.asyncio
async def test_what_cannot_be_read_is_refused() -> None:
    """No model, none of that name, too many lines, no worker, one that is being started."""
    async with controller_stack() as stack:
        for fields, refused in (
            ({"model": ""}, InvalidRequest),
            ({"model": "nobody"}, ModelNotFound),
            ({"tail": LINES_KEPT_MAX + 1}, InvalidRequest),
            ({}, InvalidRequest),
        ):
            assert isinstance(await error_of(ask(stack, **fields)), refused), fields
        stack.workers.launcher.gate.clear()
        generating = asyncio.create_task(stack.generate())
        await stack.until("a", phases.Loading)
        assert isinstance(await error_of(ask(stack)), ModelLoading)
        stack.workers.launcher.gate.set()
        await generating


@pytest.mark.asyncio
async def test_readers_are_bounded() -> None:
    """One more than may be is refused, until another has left."""
    async with controller_stack() as stack, asyncio.timeout(LIMIT_S):
        await write(stack, "one")
        calls = [ask(stack, follow=True) for _ in range(LOG_READERS_MAX)]
        for call in calls:
            await call.read()
        assert isinstance(await error_of(ask(stack, follow=True)), QueueFull)
        for call in calls:
            call.cancel()
        while await is_full(stack):
            await stack.settle()


async def is_full(stack: Stack) -> bool:
    """Whether a reader is refused because there are others."""
    try:
        await read(stack)
    except grpc.aio.AioRpcError as error:
        return isinstance(from_call(error), QueueFull)
    return False
