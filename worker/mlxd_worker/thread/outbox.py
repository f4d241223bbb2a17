"""A stream's way from the engine thread to its reader on the event loop.

Invariants:
- The engine never waits: events gather in the outbox and cross once per step, with one wake-up.
- If many streams run, a message for each token takes the cores from computing the next ones. Then
  the tokens of a stream within `HOLD_S` cross together; its first tokens, its end and whatever
  precedes its end cross at once (decision 0022).
- A stream's queue is bounded by its own length in tokens; it needs no other bound.
- Messages are made when the reader asks: the first token alone, later ones merged.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from mlxd_shared import config
from mlxd_worker.engine.request import Event, Failed, Finished, Tokens

HOLD_S: Final = 0.06
"""The longest, besides one step, that tokens wait for others of their stream."""

CROWD_STREAMS: Final = 24
"""No token waits if fewer streams have one to send."""


class Outbox:
    """Collects events on the engine thread and delivers them together."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._loop = loop
        self._clock = clock
        self._events: list[tuple[StreamReader, Event]] = []
        self._urgent: set[StreamReader] = set()
        self._sent_s = clock()

    def add(self, reader: StreamReader, event: Event) -> None:
        """Take one event for `reader`; engine thread."""
        self._events.append((reader, event))
        if reader.begins() or not isinstance(event, Tokens):
            self._urgent.add(reader)

    def flush(self, *, hold: bool = False) -> None:
        """Send what was collected to the event loop; engine thread.

        hold: tokens may wait for others, because the streams go on.
        """
        now_s = self._clock()
        hold = hold and now_s - self._sent_s < HOLD_S
        if hold and len({reader for reader, _ in self._events}) >= CROWD_STREAMS:
            due = [(reader, event) for reader, event in self._events if reader in self._urgent]
            held = [(reader, event) for reader, event in self._events if reader not in self._urgent]
        else:
            due, held, self._sent_s = self._events, [], now_s
        if due:
            self._loop.call_soon_threadsafe(_deliver, due)
        self._events = held
        self._urgent.clear()


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
        self._begun = False

    def begins(self) -> bool:
        """Return whether this is its first event; engine thread, once per event."""
        begun, self._begun = self._begun, True
        return not begun

    def put(self, event: Event) -> None:
        """Take one event from the engine; engine thread, never blocks."""
        self._outbox.add(self, event)

    def deliver(self, event: Event) -> None:
        """Queue one event for the reader; event loop."""
        self._queue.append(event)
        self._arrived.set()

    async def next(self) -> Tokens | Finished:
        """Wait for events; return them merged into one, or raise what ended the stream."""
        await self._arrived.wait()
        event = self._queue.popleft()
        tokens_max = 1 if self._first else config.EVENTS_PER_MESSAGE_MAX
        self._first = False
        while self._queue and isinstance(event, Tokens) and len(event.ids) < tokens_max:
            following = self._queue[0]
            if isinstance(following, Failed):
                break
            event = _join(event, following)
            self._queue.popleft()
        if not self._queue:
            self._arrived.clear()
        if isinstance(event, Failed):
            raise event.error.with_traceback(None)  # others may raise the same object
        return event


def _join(first: Tokens, second: Tokens | Finished) -> Tokens | Finished:
    assert first.offset + len(first.ids) == second.offset, "a gap in a stream"
    return replace(
        second,
        offset=first.offset,
        ids=first.ids + second.ids,
        text=first.text + second.text,
        logprobs=first.logprobs + second.logprobs,
    )
