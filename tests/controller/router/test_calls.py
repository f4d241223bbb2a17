"""Calls that another call may abort: what they hold is given back, and nobody waits for ever."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import grpc
import pytest

from mlxd_controller.router.calls import Calls
from mlxd_shared.domain.errors import QueueFull
from mlxd_shared.wire.status import RemoteError


class Frames:
    """A stream that says what it is told, then waits, and notes its end."""

    def __init__(self, *frames: bytes, error: Exception | None = None) -> None:
        self.frames = frames
        self.error = error
        self.waits = asyncio.Event()
        self.closed = asyncio.Event()

    async def run(self) -> AsyncGenerator[bytes, None]:
        """Yield the messages; raise the error, or wait for ever."""
        try:
            for frame in self.frames:
                yield frame
            if self.error is not None:
                raise self.error
            self.waits.set()
            await asyncio.Event().wait()
        finally:
            self.closed.set()


@pytest.mark.asyncio
async def test_an_abort_ends_a_stream_that_has_been_closed() -> None:
    """The reader hears of the end only after the stream has given back what it held."""
    calls, frames = Calls(), Frames(b"a")
    items = []
    async with aclosing(calls.read("r", frames.run())) as reading:
        async for item in reading:
            if item is None:
                assert frames.closed.is_set()
            else:
                await frames.waits.wait()
                assert calls.active == 1
                calls.abort(["nobody", "r"])
                calls.abort(["r"])
            items.append(item)

    assert items == [b"a", None]
    assert calls.active == 0


@pytest.mark.asyncio
async def test_an_abort_before_the_first_message_counts() -> None:
    """Nothing of the stream is begun."""
    calls, frames = Calls(), Frames(b"a")
    async with aclosing(calls.read("r", frames.run())) as reading:
        first = asyncio.ensure_future(anext(reading))
        await asyncio.sleep(0)
        calls.abort(["r"])
        assert await first is None


@pytest.mark.asyncio
async def test_a_reader_that_leaves_takes_the_stream_along() -> None:
    """Also one that has taken nothing yet, and whose next message waits."""
    calls, frames = Calls(), Frames(b"a", b"b", b"c", b"d")
    async with aclosing(calls.read("", frames.run())) as reading:
        assert await anext(reading) == b"a"

    assert frames.closed.is_set()
    assert calls.active == 0


@pytest.mark.asyncio
async def test_a_reader_that_leaves_as_its_call_is_aborted_is_let_go() -> None:
    """Though a message that nobody takes is in the way of the end: routers do both at once."""
    calls, frames = Calls(), Frames(b"a", b"b", b"c", b"d")
    async with asyncio.timeout(20), aclosing(calls.read("r", frames.run())) as reading:
        assert await anext(reading) == b"a"
        for _ in range(4):  # until the next message is there
            await asyncio.sleep(0)
        calls.abort(["r"])

    assert frames.closed.is_set()
    assert calls.active == 0


@pytest.mark.asyncio
async def test_an_error_reaches_the_reader_behind_what_came_before() -> None:
    """As it was raised; the call is over then."""
    calls, error = Calls(), QueueFull("streams", 1, 1.0)
    items: list[bytes | None] = []
    with pytest.raises(QueueFull) as caught:
        async with aclosing(calls.read("r", Frames(b"a", error=error).run())) as reading:
            items.extend([item async for item in reading])
    assert caught.value is error
    assert calls.active == 0


@pytest.mark.asyncio
async def test_calls_of_one_id_are_aborted_together() -> None:
    """An id is known while any of its calls goes on."""
    calls, first, second = Calls(), Frames(), Frames()
    async with (
        aclosing(calls.read("r", first.run())) as one,
        aclosing(calls.read("r", second.run())) as other,
    ):
        ends = asyncio.gather(anext(one), anext(other))
        await asyncio.gather(first.waits.wait(), second.waits.wait())
        calls.abort(["r"])
        assert list(await ends) == [None, None]


@pytest.mark.asyncio
async def test_a_question_that_is_aborted_says_so() -> None:
    """CANCELLED, where nobody has cancelled the caller; else the answer."""
    calls, begun = Calls(), asyncio.Event()

    async def wait() -> int:
        begun.set()
        await asyncio.Event().wait()
        return 1

    async def answer() -> int:
        return 2

    assert await calls.ask("r", answer()) == 2
    asking = asyncio.create_task(calls.ask("r", wait()))
    await begun.wait()
    calls.abort(["r"])
    with pytest.raises(RemoteError) as caught:
        await asking
    assert caught.value.code is grpc.StatusCode.CANCELLED

    begun.clear()
    asking = asyncio.create_task(calls.ask("r", wait()))
    await begun.wait()
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert calls.active == 0
