"""The connections to the controller: one for what is answered at once, several for streams.

Invariants:
- A server takes STREAMS_PER_CONNECTION_MAX streams of one connection at once; what is begun beyond
  them waits, without a word, behind those that run. So a stream is begun on the connection that has
  the fewest, and questions about models and health have one to themselves.
- Connections are opened when they are first needed, and stay.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Self

from mlxd import Client
from mlxd_shared import config

CONNECTIONS_MAX = -(-config.HTTP_REQUESTS_MAX // config.STREAMS_PER_CONNECTION_MAX)


@dataclass(slots=True)
class _Line:
    """A connection for streams, and how many there are on it."""

    client: Client
    streams: int = 0


class Clients:
    """Open inside `async with`; for one event loop."""

    def __init__(self, make: Callable[[], Client]) -> None:
        """Take what makes a client, not yet entered."""
        self._make = make
        self._stack = AsyncExitStack()
        self._lines: list[_Line] = []
        self.shared = make()
        """For whatever is answered at once."""

    async def __aenter__(self) -> Self:
        await self._stack.enter_async_context(self.shared)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    @asynccontextmanager
    async def lend(self) -> AsyncIterator[Client]:
        """Lend the connection that has the fewest streams, for one more around the body.

        Raises:
            InvalidRequest, BadCredentials: see Client.
        """
        is_full = all(line.streams >= config.STREAMS_PER_CONNECTION_MAX for line in self._lines)
        if is_full and len(self._lines) < CONNECTIONS_MAX:
            self._lines.append(_Line(await self._stack.enter_async_context(self._make())))
        line = min(self._lines, key=lambda each: each.streams)
        line.streams += 1
        try:
            yield line.client
        finally:
            line.streams -= 1
