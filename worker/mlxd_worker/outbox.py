"""A stream's way from the engine thread to its reader on the event loop.

Invariants:
- The engine never waits: events gather in the outbox and cross once a step, by one wake-up.
- A stream's queue is bounded by its own length in tokens; it needs no other bound.
- Messages are made as the reader asks: the first token alone, later ones joined as they piled up.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import replace

from mlxd_shared import config
from mlxd_worker.engine.request import Event, Failed, Finished, Tokens


class Outbox:
    """Collects the events of one step on the engine thread and delivers them together."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._events: list[tuple[StreamReader, Event]] = []

    def add(self, reader: StreamReader, event: Event) -> None:
        """Take one event for `reader`; engine thread."""
        self._events.append((reader, event))

    def flush(self) -> None:
        """Send everything collected to the event loop; engine thread."""
        if self._events:
            self._loop.call_soon_threadsafe(_deliver, self._events)
            self._events = []


def _deliver(events: list[tuple[StreamReader, Event]]) -> None:
    for reader, event in events:
        reader.deliver(event)


class StreamReader:
    """One stream's events: the engine's sink on one side, an iterator on the event loop's."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self._queue: deque[Event] = deque()
        self._arrived = asyncio.Event()
        self._first = True

    def put(self, event: Event) -> None:
        """Take one event from the engine; engine thread, never blocks."""
        self._outbox.add(self, event)

    def deliver(self, event: Event) -> None:
        """Queue one event for the reader; event loop."""
        self._queue.append(event)
        self._arrived.set()

    async def next(self) -> Tokens | Finished:
        """Return what has arrived, joined into one event; waits for something to arrive.

        Raises:
            MlxdError: the stream failed.
        """
        await self._arrived.wait()
        event = self._queue.popleft()
        tokens_max = 1 if self._first else config.EVENTS_PER_MESSAGE_MAX
        self._first = False
        while self._queue and isinstance(event, Tokens) and len(event.ids) < tokens_max:
            following = self._queue[0]
            if isinstance(following, Failed):
                break
            event = _joined(event, following)
            self._queue.popleft()
        if not self._queue:
            self._arrived.clear()
        if isinstance(event, Failed):
            raise event.error.with_traceback(None)  # others may raise the same object
        return event


def _joined(first: Tokens, second: Tokens | Finished) -> Tokens | Finished:
    assert first.offset + len(first.ids) == second.offset, "a gap in a stream"
    return replace(
        second,
        offset=first.offset,
        ids=first.ids + second.ids,
        text=first.text + second.text,
        logprobs=first.logprobs + second.logprobs,
    )
