"""One generation of a request: begun under any of its model's names, read event by event, ended.

Invariants:
- One owner at a time: the handler that begins it, then the response that reads it. Whoever has it
  ends it (`aclose`), which frees its row; a second end is none.
- What is read is whole and in order: mlxd's client resumes over the death of worker or controller.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Protocol, TypeVar

from mlxd import (
    Delta,
    Finished,
    FinishReason,
    MlxdError,
    ModelNotFound,
    ModelState,
    ModelUnloaded,
    Stream,
)
from mlxd_gateway.common.asks import Ask, name_candidates
from mlxd_gateway.common.clients import Clients

Event = Delta | Finished
_T = TypeVar("_T")


class Source(Protocol):
    """What an answer is made of: begun, read event by event, and closed by whoever owns it."""

    @property
    def ask(self) -> Ask:
        """What was asked; its names are those of fields in errors."""

    @property
    def has_begun(self) -> bool:
        """Whether its first event has come."""

    async def begin(self, wait_s: float | None = None) -> None:
        """Send it, and wait for the first event for up to `wait_s` (None: for ever)."""

    def events(self) -> AsyncIterator[Event]:
        """Yield every event."""

    async def describe_wait(self) -> str:
        """Return what is being waited for, for people."""

    async def aclose(self) -> None:
        """End what is left of it. Idempotent."""


async def under_any_name(name: str, call: Callable[[str], Awaitable[_T]]) -> _T:
    """Return what `call` returns for the first of a model's names that there is.

    Raises:
        ModelNotFound: there is none; names `name`.
        MlxdError: another error of `call`.
    """
    missing: ModelNotFound | None = None
    for candidate in name_candidates(name):
        try:
            return await call(candidate)
        except ModelNotFound as error:
            missing = missing or error
    assert missing is not None
    raise missing


class Generation:
    """Begin it, then read its events, then close it, on one event loop."""

    def __init__(self, clients: Clients, ask: Ask, *, request_id: str = "") -> None:
        """Prepare `ask`; nothing is sent yet. request_id: empty leaves it to the server."""
        self.ask = ask
        self._clients = clients
        self._lent = AsyncExitStack()
        self._request_id = request_id
        self._stream: Stream[Event] | None = None
        self._first: asyncio.Task[Event] | None = None

    @property
    def has_begun(self) -> bool:
        """Whether its first event has come."""
        return self._first is not None and self._first.done()

    async def begin(self, wait_s: float | None = None) -> None:
        """Send the request, and wait for its first event for up to `wait_s` (None: for ever).

        Raises:
            MlxdError: the request failed within that time.
        """
        self._first = asyncio.create_task(self._begin())
        done, _ = await asyncio.wait({self._first}, timeout=wait_s)
        if done:
            self._first.result()

    async def events(self) -> AsyncIterator[Event]:
        """Yield every event, Finished last.

        Raises:
            MlxdError: the request failed, or an operator ended it.
        """
        assert self._first is not None, "begin it first"
        yield self._check(await asyncio.shield(self._first))
        assert self._stream is not None
        async for event in self._stream:  # to its end, which is behind Finished
            yield self._check(event)

    def _check(self, event: Event) -> Event:
        """Return the event, unless it is an end that no API has a word for."""
        if isinstance(event, Finished) and event.reason is FinishReason.CANCELLED:
            raise ModelUnloaded(self.ask.model)
        return event

    async def describe_wait(self) -> str:
        """Return what the model is doing, for people: a load shows how far it has come."""
        if self.has_begun:
            return "generating"
        try:
            model = await under_any_name(self.ask.model, self._clients.shared.model)
        except MlxdError:
            return "waiting"
        if model.state is not ModelState.LOADING or not model.progress.bytes_total:
            return "waiting" if model.state is ModelState.READY else model.state.value
        share = model.progress.bytes_read / model.progress.bytes_total
        return f"{model.progress.stage or 'loading'} {share:.0%}"

    async def aclose(self) -> None:
        """End what is left of it. Idempotent."""
        if self._first is not None and not self._first.done():
            self._first.cancel()
            await asyncio.wait({self._first})
        if self._stream is not None:
            await self._stream.aclose()
        await self._lent.aclose()

    async def _begin(self) -> Event:
        """Return the first event of a stream with the model, under whichever name there is one."""
        client = await self._lent.enter_async_context(self._clients.lend())

        async def open_stream(name: str) -> Event:
            ask = self.ask
            # A try in vain would be a request more to the limits of a key.
            if ask.plain is not None and not (await client.model(name)).has_chat_template:
                ask = replace(ask, prompt=ask.plain)
            self._stream = ask.start(client, name, self._request_id)
            return await anext(self._stream)

        return await under_any_name(self.ask.model, open_stream)
