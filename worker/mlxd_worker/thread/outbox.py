"""A stream's way from the engine thread to its reader on the event loop.

Invariants:
- The engine never waits: events gather in the outbox and cross once per step, with one wake-up.
- What a stream is owed is asked for when it is to cross, or something else of the stream comes.
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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain, pairwise
from typing import Final

from mlxd_shared import config
from mlxd_worker.engine.request import Event, Failed, Finished, Sink, Tell, Tokens

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
        self._held: dict[StreamReader, list[Event]] = {}
        """What each reader is to get, in order; nothing for a reader without."""
        self._owed: dict[StreamReader, Tell] = {}
        """What returns what each reader is to get behind that."""
        self._urgent: set[StreamReader] = set()
        self._sent_s = clock()

    def add(self, reader: StreamReader, event: Event) -> None:
        """Take one event for `reader`; engine thread."""
        self._settle(reader)
        self._hold(reader, event)
        if not reader.begun or not isinstance(event, Tokens):
            reader.begun = True
            self._urgent.add(reader)

    def owe(self, reader: StreamReader, tell: Tell) -> None:
        """Take what a reader is owed; it has begun, and is owed nothing. Engine thread.

        It is never asked for in this call: what a row does next may not follow from that.
        """
        self._owed[reader] = tell

    def _settle(self, reader: StreamReader) -> None:
        tell = self._owed.pop(reader, None)
        for event in () if tell is None else tell():
            self._hold(reader, event)
            if isinstance(event, Failed):
                self._urgent.add(reader)

    def _hold(self, reader: StreamReader, event: Event) -> None:
        held = self._held.get(reader)
        if held is None:
            self._held[reader] = [event]
        else:
            held.append(event)

    def flush(self, *, hold: bool = False) -> None:
        """Send what was collected to the event loop; engine thread.

        hold: tokens may wait for others, because the streams go on. What this costs does not grow
        with what is held. A reader that has something held and is owed something counts twice, for
        no longer than `HOLD_S`.
        """
        now_s = self._clock()
        hold = hold and now_s - self._sent_s < HOLD_S
        if hold and len(self._held) + len(self._owed) >= CROWD_STREAMS:
            due = {reader: self._held.pop(reader) for reader in self._urgent}
        else:
            for reader in list(self._owed):
                self._settle(reader)
            due, self._held, self._sent_s = self._held, {}, now_s
        if due:
            self._loop.call_soon_threadsafe(_deliver, due)
        self._urgent.clear()


def _deliver(due: Mapping[StreamReader, Sequence[Event]]) -> None:
    for reader, events in due.items():
        reader.deliver(events)


class StreamReader(Sink):
    """One stream's events: the engine's sink on one side, an iterator on the event loop's."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self._queue: deque[Event] = deque()
        self._arrived = asyncio.Event()
        self._first = True
        self.begun = False
        """Whether it has had an event; the outbox's, engine thread."""

    def put(self, event: Event) -> None:
        """Take one event from the engine; engine thread, never blocks."""
        self._outbox.add(self, event)

    def owe(self, tell: Tell) -> None:
        """Have what the stream is owed asked for when it is to cross; engine thread."""
        self._outbox.owe(self, tell)

    def deliver(self, events: Iterable[Event]) -> None:
        """Queue events for the reader; event loop."""
        self._queue.extend(events)
        self._arrived.set()

    async def next(self) -> Tokens | Finished:
        """Wait for events; return them merged into one, or raise what ended the stream."""
        await self._arrived.wait()
        queue = self._queue
        tokens_max = 1 if self._first else config.EVENTS_PER_MESSAGE_MAX
        self._first = False
        event = queue.popleft()
        merged: list[Tokens | Finished] = []
        count = 0
        while isinstance(event, Tokens):
            merged.append(event)
            count += len(event.ids)
            if count >= tokens_max or not queue or isinstance(queue[0], Failed):
                break
            if count + len(queue[0].ids) > tokens_max:
                break
            event = queue.popleft()
        if not queue:
            self._arrived.clear()
        if isinstance(event, Failed):
            raise event.error.with_traceback(None)  # others may raise the same object
        if isinstance(event, Finished):
            merged.append(event)
        return merged[0] if len(merged) == 1 else _join(merged)


def _join(events: Sequence[Tokens | Finished]) -> Tokens | Finished:
    """Return one event for several of a stream, all at once: each join by itself would copy all."""
    first, last = events[0], events[-1]
    for before, after in pairwise(events):
        assert before.offset + len(before.ids) == after.offset, "a gap in a stream"
    return replace(
        last,
        offset=first.offset,
        ids=tuple(chain.from_iterable([event.ids for event in events])),
        text="".join([event.text for event in events]),
        logprobs=tuple(chain.from_iterable([event.logprobs for event in events])),
    )
