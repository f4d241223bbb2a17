"""Streams in flight, and how events become messages."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

import pytest

from mlxd_shared import config
from mlxd_shared.domain.cache_reasons import CacheReason
from mlxd_shared.domain.errors import DuplicateRequest, InternalError, QueueFull, ShuttingDown
from mlxd_shared.domain.requests import FinishReason
from mlxd_worker.engine.request import (
    Event,
    Failed,
    Finished,
    PositionLogprobs,
    TokenLogprob,
    Tokens,
    Usage,
)
from mlxd_worker.front.streams import Streams
from mlxd_worker.thread.outbox import CROWD_STREAMS, HOLD_S, Outbox, StreamReader
from tests.support.counting import calls_of

USAGE = Usage(1, 0, CacheReason.NONE, 1, 0.0, 0.0, 0.0, 0)


def token(offset: int) -> Tokens:
    """Return one token's event."""
    return Tokens(offset, (100 + offset,), f"<{offset}>")


def end(offset: int) -> Finished:
    """Return an end without a token of its own."""
    return Finished(offset, (), "!", FinishReason.EOS, USAGE)


async def reader_of(*events: Event) -> StreamReader:
    """Return a reader to whom these events have come while it was busy."""
    outbox = Outbox(asyncio.get_running_loop())
    reader = StreamReader(outbox)
    for event in events:
        reader.put(event)
    outbox.flush()
    await asyncio.sleep(0)
    return reader


@pytest.mark.asyncio
async def test_the_first_token_goes_alone() -> None:
    """Whatever has piled up behind it, the first message has one token; the next has the rest."""
    reader = await reader_of(*(token(i) for i in range(5)), end(5))

    assert await reader.next() == token(0)
    rest = await reader.next()
    assert isinstance(rest, Finished)
    assert (rest.offset, rest.ids) == (1, (101, 102, 103, 104))
    assert rest.text == "<1><2><3><4>!"
    assert rest.usage is USAGE


@pytest.mark.asyncio
async def test_log_probabilities_are_joined_with_their_ids() -> None:
    """A joined message has one entry for each of its ids, the end's own among them."""
    positions = [PositionLogprobs(TokenLogprob(100 + i, -0.5 * i)) for i in range(4)]
    events = [replace(token(i), logprobs=(positions[i],)) for i in range(3)]
    last = replace(end(3), ids=(103,), logprobs=(positions[3],))
    reader = await reader_of(*events, last)

    assert (await reader.next()).logprobs == (positions[0],)
    rest = await reader.next()
    assert rest.logprobs == tuple(positions[1:])
    assert tuple(position.chosen.token_id for position in rest.logprobs) == rest.ids


@pytest.mark.asyncio
async def test_a_message_is_bounded() -> None:
    """A slow reader gets messages of at most EVENTS_PER_MESSAGE_MAX tokens, without a gap."""
    most = config.EVENTS_PER_MESSAGE_MAX
    reader = await reader_of(*(token(i) for i in range(2 * most + 1)), end(2 * most + 1))

    sizes = []
    offset = 0
    while True:
        event = await reader.next()
        assert event.offset == offset
        offset += len(event.ids)
        sizes.append(len(event.ids))
        if isinstance(event, Finished):
            break
    assert sizes == [1, most, most, 0]


@pytest.mark.asyncio
async def test_a_failure_comes_after_what_was_generated() -> None:
    """Tokens before a failure still reach the client."""
    error = InternalError("id")
    reader = await reader_of(token(0), token(1), token(2), Failed(error))

    assert await reader.next() == token(0)
    assert (await reader.next()).ids == (101, 102)
    with pytest.raises(InternalError) as caught:
        await reader.next()
    assert caught.value is error


@pytest.mark.asyncio
async def test_a_message_is_joined_once() -> None:
    """However many tokens it has: joined one by one, each would copy all before it."""
    reader = await reader_of(*(token(i) for i in range(40)))
    assert (await reader.next()).ids == (100,)
    message = reader.next()

    def ask() -> None:
        with pytest.raises(StopIteration) as done:
            message.send(None)
        assert done.value.value.ids == tuple(range(101, 140))

    assert calls_of(ask, replace) == 1


class CountedReader(StreamReader):
    """A reader that counts how often the outbox looks for it."""

    looked_for = 0

    def __hash__(self) -> int:
        """Count, and stay one of its own."""
        CountedReader.looked_for += 1
        return id(self)


@pytest.mark.asyncio
async def test_what_is_held_costs_a_step_nothing() -> None:
    """A hand-over looks at those whose events are due, not at all that waits."""
    now_s = 0.0
    outbox = Outbox(asyncio.get_running_loop(), clock=lambda: now_s)
    readers = [CountedReader(outbox) for _ in range(CROWD_STREAMS)]
    looks = []
    for step in range(4):
        for reader in readers:
            reader.put(token(step))
        CountedReader.looked_for = 0
        outbox.flush(hold=True)
        looks.append(CountedReader.looked_for)
        now_s += HOLD_S / 10

    assert looks[1:] == [0, 0, 0]
    outbox.flush()


class Crowd:
    """Streams that have a token each a step, on a clock that only the test moves.

    owing: whether all but their first tokens and their ends are owed until they are asked for.
    """

    def __init__(self, streams: int, *, owing: bool = False) -> None:
        self.now_s = 0.0
        self.tell_count = 0
        """How often they were."""
        self._owing = owing
        self._reported = [0] * streams
        self.outbox = Outbox(asyncio.get_running_loop(), clock=lambda: self.now_s)
        self.readers = [StreamReader(self.outbox) for _ in range(streams)]
        self._steps = 0

    async def step(self, seconds: float, *, ends: int | None = None, hold: bool = True) -> None:
        """Give each stream a token, that of index `ends` its end; let so much time pass before."""
        self.now_s += seconds
        for index, reader in enumerate(self.readers):
            if index == ends:
                reader.put(end(self._steps))
            elif not self._owing or not reader.begun:
                reader.put(token(self._steps))
                self._reported[index] += 1
            elif self._reported[index] == self._steps:
                reader.owe(partial(self._tell, index))
        self._steps += 1
        self.outbox.flush(hold=hold)
        await asyncio.sleep(0)

    def _tell(self, index: int) -> list[Event]:
        self.tell_count += 1
        first, self._reported[index] = self._reported[index], self._steps
        ids = tuple(100 + offset for offset in range(first, self._steps))
        return [Tokens(first, ids, "")] if ids else []

    async def count_arrived(self, index: int) -> int:
        """Return how many tokens a reader has that it had not been asked for; 0 for none."""
        reader = self.readers[index]
        waiting = asyncio.ensure_future(reader.next())
        await asyncio.sleep(0)
        if not waiting.done():
            waiting.cancel()
            return 0
        return len(waiting.result().ids)


OWING = pytest.mark.parametrize("owing", [False, True])


@OWING
@pytest.mark.asyncio
async def test_tokens_of_a_crowd_cross_together(owing: bool) -> None:
    """First tokens cross at once; later ones wait for each other, as long as is said, no longer."""
    crowd = Crowd(CROWD_STREAMS, owing=owing)
    await crowd.step(0.0)
    assert await crowd.count_arrived(0) == 1

    await crowd.step(HOLD_S / 2)
    assert await crowd.count_arrived(0) == 0
    await crowd.step(HOLD_S / 2)
    assert await crowd.count_arrived(0) == 2
    await crowd.step(HOLD_S)
    assert await crowd.count_arrived(0) == 1


@OWING
@pytest.mark.asyncio
async def test_tokens_of_few_streams_never_wait(owing: bool) -> None:
    """With a stream less than a crowd each token is its own message."""
    crowd = Crowd(CROWD_STREAMS - 1, owing=owing)
    for _ in range(3):
        await crowd.step(HOLD_S / 10)
        assert await crowd.count_arrived(0) == 1


@OWING
@pytest.mark.asyncio
async def test_an_end_waits_for_nobody(owing: bool) -> None:
    """A stream's end crosses at once, behind what was held of it; the others' tokens still wait."""
    crowd = Crowd(CROWD_STREAMS, owing=owing)
    await crowd.step(0.0)
    assert [await crowd.count_arrived(index) for index in (0, 1)] == [1, 1]

    await crowd.step(HOLD_S / 4)
    await crowd.step(HOLD_S / 4, ends=1)

    assert await crowd.count_arrived(0) == 0
    last = await crowd.readers[1].next()
    assert isinstance(last, Finished)
    assert last.ids == (101,)


@pytest.mark.asyncio
async def test_what_is_owed_is_asked_for_when_it_crosses() -> None:
    """Not in the steps between; then once for all tokens of a stream."""
    crowd = Crowd(CROWD_STREAMS, owing=True)
    await crowd.step(0.0)
    for _ in range(3):
        await crowd.step(HOLD_S / 4)
    assert crowd.tell_count == 0
    await crowd.step(HOLD_S / 4)
    assert crowd.tell_count == CROWD_STREAMS
    assert await crowd.count_arrived(0) == 1, "the first one"
    assert await crowd.count_arrived(0) == 4


@pytest.mark.asyncio
async def test_a_message_has_no_more_than_is_said_of_large_events() -> None:
    """What was owed may come several tokens at a time."""
    most = config.EVENTS_PER_MESSAGE_MAX
    sizes = (1, most - 1, 2, most)
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    events = [Tokens(at, (7,) * size, "") for at, size in zip(starts, sizes, strict=True)]
    reader = await reader_of(*events)
    assert [len((await reader.next()).ids) for _ in sizes] == list(sizes)


@pytest.mark.asyncio
async def test_an_error_in_what_is_owed_waits_for_nobody() -> None:
    """It may come with another event of its stream, and goes first."""
    crowd = Crowd(CROWD_STREAMS, owing=True)
    await crowd.step(0.0)
    assert await crowd.count_arrived(0) == 1
    crowd.readers[0].owe(lambda: [Failed(ShuttingDown())])
    crowd.readers[0].put(token(1))
    crowd.outbox.flush(hold=True)
    await asyncio.sleep(0)
    with pytest.raises(ShuttingDown):
        await crowd.readers[0].next()


@OWING
@pytest.mark.asyncio
async def test_nothing_is_held_once_nothing_runs(owing: bool) -> None:
    """What is held goes as soon as the engine has nothing more to do."""
    crowd = Crowd(CROWD_STREAMS, owing=owing)
    await crowd.step(0.0)
    assert await crowd.count_arrived(0) == 1
    await crowd.step(HOLD_S / 4)
    crowd.outbox.flush()
    await asyncio.sleep(0)

    assert await crowd.count_arrived(0) == 1


@pytest.mark.asyncio
async def test_a_reader_waits_for_more() -> None:
    """With nothing there the reader sleeps until something comes."""
    reader = await reader_of(token(0))
    assert await reader.next() == token(0)
    waiting = asyncio.ensure_future(reader.next())
    await asyncio.sleep(0)
    assert not waiting.done()
    reader.deliver([token(1)])
    assert await waiting == token(1)


@pytest.mark.asyncio
async def test_ids_are_held_while_in_flight() -> None:
    """A request id names one stream at a time, however that ends."""
    streams = Streams()
    with streams.open("a", rows_max=1) as first, streams.open("b", rows_max=1) as second:
        assert first != second
        assert len(streams) == 2
        assert not streams.idle.is_set()
        with pytest.raises(DuplicateRequest), streams.open("a", rows_max=1):
            pass
        assert await streams.drain(0.0) == 2
    with pytest.raises(KeyError), streams.open("a", rows_max=1):
        raise KeyError
    assert streams.idle.is_set()
    assert await streams.drain(0.0) == 0


@pytest.mark.asyncio
async def test_streams_are_bounded() -> None:
    """Rows and waiting places together are the limit, exactly."""
    streams = Streams()
    with ExitStack() as stack:
        for number in range(2 + config.WAITING_STREAMS_MAX):
            stack.enter_context(streams.open(str(number), rows_max=2))
        with pytest.raises(QueueFull) as caught, streams.open("more", rows_max=2):
            pass
        assert caught.value.limit == config.WAITING_STREAMS_MAX
    with streams.open("more", rows_max=2):
        pass
