"""Several generations of one request, as one: their choices are counted through.

Invariants:
- At most CHOICES_MAX choices are made at once, however many prompts there are.
- The whole fails with the first that fails; whatever it has come to, none is left behind.
- Events come as they are made, each generation's in order.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

from mlxd_gateway.common.asks import Ask
from mlxd_gateway.common.generation import Event, Generation
from mlxd_shared import config

_Arrival = Event | tuple[Generation, Exception] | None
"""An event, which generation failed with what, or the end of one."""


class Batch:
    """Begin it, then read its events, then close it, as a Generation."""

    def __init__(self, generations: Sequence[Generation]) -> None:
        """Prepare generations that are not begun, of so many choices each as the first one's."""
        self._generations = generations
        self._choices = generations[0].ask.n or 1
        self._turns = asyncio.Semaphore(max(config.CHOICES_MAX // self._choices, 1))
        self._arrivals: asyncio.Queue[_Arrival] = asyncio.Queue(len(generations))
        self._tasks: list[asyncio.Task[None]] = []
        self._first: asyncio.Task[_Arrival] | None = None
        self._failed: Generation | None = None

    @property
    def ask(self) -> Ask:
        """What failed was asked, or what was asked first."""
        return (self._failed or self._generations[0]).ask

    @property
    def has_begun(self) -> bool:
        """Whether its first event has come."""
        return self._first is not None and self._first.done()

    async def begin(self, wait_s: float | None = None) -> None:
        """Send the requests, and wait for the first event for up to `wait_s` (None: for ever).

        Raises:
            MlxdError: one of them failed within that time.
        """
        self._tasks = [
            asyncio.create_task(self._run(each, index * self._choices))
            for index, each in enumerate(self._generations)
        ]
        self._first = asyncio.create_task(self._arrivals.get())
        done, _ = await asyncio.wait({self._first}, timeout=wait_s)
        if done:
            self._check(self._first.result())

    async def events(self) -> AsyncIterator[Event]:
        """Yield every event; each generation's ends are among them.

        Raises:
            MlxdError: one of them failed, or an operator ended it.
        """
        assert self._first is not None, "begin it first"
        left = len(self._generations)
        arrival = await asyncio.shield(self._first)
        while True:
            event = self._check(arrival)
            if event is not None:
                yield event
            else:
                left -= 1
                if not left:
                    return
            arrival = await self._arrivals.get()

    async def describe_wait(self) -> str:
        """Return what the model is doing, for people."""
        return "generating" if self.has_begun else await self._generations[0].describe_wait()

    async def aclose(self) -> None:
        """End what is left of it. Idempotent."""
        tasks = [*self._tasks, *([] if self._first is None else [self._first])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, generation: Generation, first_choice: int) -> None:
        """Pass a generation's events on when it is its turn, then its end."""
        async with self._turns:
            try:
                await generation.begin()
                async for event in generation.events():
                    await self._arrivals.put(replace(event, choice=first_choice + event.choice))
            except Exception as error:  # noqa: BLE001 - whatever it is, the reader raises it
                await self._arrivals.put((generation, error))
            else:
                await self._arrivals.put(None)
            finally:
                await generation.aclose()

    def _check(self, arrival: _Arrival) -> Event | None:
        """Return an event, or None at an end; raise what a generation failed with."""
        if isinstance(arrival, tuple):
            self._failed, error = arrival
            raise error
        return arrival
