"""What a server takes in: on an account, on threads where it is large, gone with its caller."""

from __future__ import annotations

import asyncio
import contextvars
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from google.protobuf.message import DecodeError
from grpc_reflection.v1alpha import reflection_pb2

from mlxd.v1 import inference_pb2
from mlxd_shared import config
from mlxd_shared.domain.errors import InvalidRequest, QueueFull
from mlxd_shared.security.net import parse_address
from mlxd_shared.serving.server import Health, listen, make_server
from mlxd_shared.wire.intake import Intake, Reader, as_checked, run_paced, sent_nbytes
from mlxd_shared.wire.status import code_of, from_call
from mlxd_shared.wire.wire_scan import FROM_CLIENTS, Limits, Size, plan_of, scan
from tests.support.overfull import frame, number

SMALL = frame(2, b"x")
LARGE = frame(2, b"x" * (2 * config.INLINE_REQUEST_BYTES_MAX))
PLAN = plan_of(inference_pb2.GenerateRequest.DESCRIPTOR)
READER = Reader(inference_pb2.GenerateRequest, FROM_CLIENTS)


def generate() -> inference_pb2.GenerateRequest:
    """A request with something in every kind of place."""
    request = inference_pb2.GenerateRequest(model="m", stop=["a", "b"], priority=-1)
    request.sampling.temperature = 0.5
    request.sampling.logit_bias.update({1: 1.0, 300: -1.0})
    request.chat.messages.add(role="user", content="hi" * 100).tool_calls.add(name="f")
    request.stop_token_ids.extend([1, 300, 70_000])
    return request


def test_a_request_is_measured_as_it_is_written() -> None:
    """Fields, entries and numbers are counted wherever they stand, and nothing else is."""
    raw = generate().SerializeToString()
    # model, 2 stops, priority; sampling, temperature and 2 biases of 2; chat, its message with
    # role, content, a call and its name; the list of ids.
    assert scan(raw, PLAN, FROM_CLIENTS) == Size(
        len(raw), parts=4 + 2 + 2 * 3 + 2 + 4 + 1, numbers=3
    )
    exact = Limits(parts=19, numbers=3)
    assert scan(raw, PLAN, exact).parts == exact.parts
    for less in (Limits(parts=18), Limits(numbers=2)):
        with pytest.raises(InvalidRequest):
            scan(raw, PLAN, less)


@pytest.mark.parametrize(
    "raw",
    [
        b"\x0a", b"\x0a\x05abc", b"\x30", b"\x30" + b"\xff" * 10 + b"\x01", b"\x07", b"\x02\x00",
        b"\x3b", b"\x3c", b"\xff\xff\xff\xff\xff\x01\x00", frame(5, b"\x0d\x00"), b"\x2a\xff" * 3,
    ],
    ids=bytes.hex,
)  # fmt: skip
def test_what_is_no_message_is_not_parsed(raw: bytes) -> None:
    """Cut off, endless, of a kind that there is not: the walk refuses what a parser would."""
    with pytest.raises(DecodeError):
        scan(raw, PLAN, FROM_CLIENTS)
    with pytest.raises(InvalidRequest) as caught:
        READER.size(raw)
    assert caught.value.violations[0].field == "request"


@pytest.mark.asyncio
async def test_the_account_is_even_after_each_call_and_full_at_its_bound() -> None:
    """A request holds room for all that is made of it; where there is none, it may come again."""
    intake = Intake(held_nbytes_max=Size(len(LARGE), parts=1).held_nbytes + 1000)
    async with intake.take(LARGE, READER) as request:
        assert len(request.text) == len("x" * (2 * config.INLINE_REQUEST_BYTES_MAX))
        assert intake.held_nbytes == Size(len(LARGE), parts=1).held_nbytes
        with pytest.raises(QueueFull) as caught:
            async with intake.take(LARGE, READER):
                pass
        assert code_of(caught.value) is grpc.StatusCode.RESOURCE_EXHAUSTED
        async with intake.take(SMALL, READER):
            assert intake.held_nbytes > Size(len(LARGE), parts=1).held_nbytes
        many = SMALL + b"\x2a\x00" * 100
        with pytest.raises(QueueFull):  # its bytes have room, what would be made of them has not
            async with intake.take(many, READER):
                pass
    assert intake.held_nbytes == 0


@pytest.mark.asyncio
async def test_what_large_requests_leave_in_the_heap_is_given_back() -> None:
    """Once, on a thread, when little is held again; small requests alone have nothing trimmed."""
    trimmed: asyncio.Queue[str] = asyncio.Queue()
    loop = asyncio.get_running_loop()

    def trim() -> None:
        loop.call_soon_threadsafe(trimmed.put_nowait, threading.current_thread().name)

    intake = Intake(trim=trim)
    reader = Reader(inference_pb2.GenerateRequest, FROM_CLIENTS)
    small = inference_pb2.GenerateRequest(text="x").SerializeToString()
    large = inference_pb2.GenerateRequest(text="x" * (8 << 20)).SerializeToString()
    async with intake.take(small, reader):  # a stream that lasts keeps nobody's memory
        async with intake.take(small, reader):
            pass
        assert intake._trimming is None
        async with intake.take(large, reader):
            assert intake._trimming is None
        assert (await trimmed.get()).startswith("requests")
    assert trimmed.empty()
    assert intake._trimming is None


@pytest.mark.asyncio
async def test_what_is_large_is_read_on_a_thread() -> None:
    """The event loop's own thread reads what is small alone."""
    intake, loops = Intake(), threading.current_thread()
    async with intake.take(SMALL, READER):
        assert await run_paced(threading.current_thread) is loops
    async with intake.take(LARGE, READER):
        assert await run_paced(threading.current_thread) is not loops


@pytest.mark.asyncio
async def test_a_request_is_passed_on_as_it_came() -> None:
    """In the bytes that were parsed, with what is changed behind them; what was made of it is not
    what came. Once the call has ended nobody holds the bytes, though tasks of its own live on."""
    request = generate()
    raw = request.SerializeToString()
    changes = inference_pb2.GenerateRequest(request_id="r", stop=["c"], priority=2)
    changes.chat.now.seconds = 7
    async with Intake().take(raw, READER) as message:
        passed = as_checked(message, changes)
        assert passed.raw is raw
        made = inference_pb2.GenerateRequest(text="x")
        assert as_checked(made).raw == made.SerializeToString()
        assert sent_nbytes(message) == len(raw)
        alike = inference_pb2.GenerateRequest.FromString(raw)
        assert as_checked(alike).raw is not raw
        later = contextvars.copy_context()
    request.request_id, request.priority, request.chat.now.seconds = "r", 2, 7
    request.stop.append("c")
    assert inference_pb2.GenerateRequest.FromString(passed.whole()) == request
    assert later.run(as_checked, message).raw is not raw


@pytest.mark.asyncio
async def test_whoever_leaves_takes_its_work_along() -> None:
    """What waits for a thread never begins; what has begun keeps its room until it is over."""
    intake, go_on, begun = Intake(), threading.Event(), list[int]()
    busy = threading.Barrier(config.REQUEST_THREADS_MAX + 1)

    def work(index: int) -> None:
        begun.append(index)
        busy.wait(60)
        assert go_on.wait(60)

    async def call(index: int) -> None:
        async with intake.take(LARGE, READER):
            await run_paced(work, index)

    calls = [asyncio.create_task(call(index)) for index in range(config.REQUEST_THREADS_MAX)]
    await asyncio.to_thread(busy.wait, 60)
    late = asyncio.create_task(call(-1))  # behind those at work even to be measured
    await asyncio.sleep(0)
    for task in (late, calls[0]):
        task.cancel()
    await asyncio.wait({late})
    assert late.cancelled()
    assert intake.held_nbytes == len(calls) * Size(len(LARGE), parts=1).held_nbytes
    assert not calls[0].done()
    go_on.set()
    await asyncio.wait(calls)
    assert calls[0].cancelled()
    assert calls[1].result() is None
    assert sorted(begun) == [0, 1]
    assert intake.held_nbytes == 0


@pytest.mark.asyncio
async def test_however_often_a_call_is_cancelled_its_room_is_held_while_it_is_worked_on() -> None:
    """Its deadline, its client's leaving and the server's stop may all end it."""
    intake, go_on, begun = Intake(), threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        assert go_on.wait(60)

    async def call() -> None:
        async with intake.take(LARGE, READER):
            await run_paced(work)

    task = asyncio.create_task(call())
    assert await asyncio.to_thread(begun.wait, 60)
    for _ in range(3):
        task.cancel()
        for _ in range(10):
            await asyncio.sleep(0)
        assert not task.done()
        assert intake.held_nbytes == Size(len(LARGE), parts=1).held_nbytes
    go_on.set()
    await asyncio.wait({task})
    assert task.cancelled()
    assert intake.held_nbytes == 0


@asynccontextmanager
async def serve_intake() -> AsyncIterator[grpc.aio.Channel]:
    """A real server with nothing but health and reflection."""
    server = make_server(Health(), ())
    address = listen(server, parse_address("127.0.0.1:0"))
    await server.start()
    async with grpc.aio.insecure_channel(address) as channel:
        yield channel
    await server.stop(None)


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("raw", "limit"),
    [
        (frame(7, b"x" * (config.REQUEST_TEXT_BYTES_MAX + 1)), "at most 16384"),
        (frame(7, b"x" * config.SMALL_REQUEST_BYTES_MAX), "at most 65536"),
        (b"\x0a\x05", "not a message"),
    ],
    ids=["a long text", "a long message", "no message"],
)
async def test_requests_in_a_stream_are_bounded_too(raw: bytes, limit: str) -> None:
    """Reflection's requests come one by one; each is looked at before it is parsed."""
    method = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
    async with serve_intake() as channel:
        ask: Any = channel.stream_stream(method)
        good = reflection_pb2.ServerReflectionRequest(list_services="").SerializeToString()
        assert len([answer async for answer in ask(iter([good]))]) == 1
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in ask(iter([raw])):
                pass
        error = from_call(caught.value)
        assert isinstance(error, InvalidRequest)
        assert limit in error.describe()


FIGURES = """
import sys
from mlxd.v1 import inference_pb2
from mlxd_shared.wire.convert import generate_from_pb
from mlxd_shared.wire.wire_scan import FROM_CLIENTS, plan_of, scan
from tests.shared.wire.test_intake import WORST
from tests.support.peaks import peak_nbytes
kind = inference_pb2.GenerateRequest
generate_from_pb(kind(text="x"))
raw = WORST[sys.argv[1]]()
before = peak_nbytes()
request = kind.FromString(raw)
spec = generate_from_pb(request)
sent = request.SerializeToString()
grown = peak_nbytes() - before
print(grown + len(raw), scan(raw, plan_of(kind.DESCRIPTOR), FROM_CLIENTS).held_nbytes)
"""
WORST = {
    "text": lambda: frame(2, "\u4e00".encode() * (3 << 20)),
    "ids": lambda: frame(3, frame(1, number(70_000) * (2 << 20))),
    "messages": lambda: frame(4, frame(1, frame(1, b"user") + frame(2, b"hi")) * 8192),
    "calls": lambda: frame(
        4, frame(1, frame(1, b"assistant") + frame(6, frame(2, b"f") + frame(3, b"{}")) * 8192)
    ),
    "choices": lambda: SMALL + frame(14, frame(5, frame(1, b"a") * 4096)),
}


@pytest.mark.parametrize("worst", WORST)
def test_a_request_takes_no_more_than_its_account(worst: str) -> None:
    """What a process grows by when it parses, converts and passes on is what was reckoned."""
    done = subprocess.run(
        (sys.executable, "-c", FIGURES, worst), check=True, capture_output=True, text=True
    )
    grown, held = map(int, done.stdout.split())
    assert grown <= held + config.MIB, (grown, held)
