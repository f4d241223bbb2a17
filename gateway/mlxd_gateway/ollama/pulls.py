"""A pull as Ollama's clients follow it: lines of progress, or one word at its end.

Invariants:
- A pull belongs to the handler until its answer is returned, and then to the answer, which closes
  it however it ends; its download ends then, unless others follow it too.
- A refusal that comes within HTTP_FIRST_S has a status of its own; a later one is a line.
- A pull that lasts does not hold up a gateway that is leaving.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack

from mlxd import MlxdError, PullPhase, PullProgress, ShuttingDown, Stream
from mlxd_gateway.common.asks import LATEST, without_hub
from mlxd_gateway.common.clients import Clients
from mlxd_gateway.common.failures import failure_of
from mlxd_gateway.common.owned import OwningResponse, next_of
from mlxd_gateway.common.responses import LINES, write_line
from mlxd_gateway.ollama.errors import error_body

_DIGITS = 12
"""Of a digest, which stand for it where people read."""
_WAITING = (PullPhase.WAITING, PullPhase.LISTING)
Line = dict[str, object]


class Pull:
    """One pull: begin it, then read its steps, then close it."""

    def __init__(self, clients: Clients, leaving: asyncio.Event) -> None:
        """Prepare it; nothing is asked yet. It ends early where `leaving` is set."""
        self._clients = clients
        self._leaving = leaving
        self._held = AsyncExitStack()
        self._steps: Stream[PullProgress] | None = None
        self._begun: list[PullProgress] = []
        self._next: asyncio.Task[PullProgress | None] | None = None

    async def begin(self, model: str, wait_s: float) -> None:
        """Ask for it, and wait for up to `wait_s` until it is known whether there is such a model.

        Raises:
            MlxdError: it failed within that time.
        """
        client = await self._held.enter_async_context(self._clients.lend())
        self._steps = await self._held.enter_async_context(client.pull(model))
        until_s = asyncio.get_running_loop().time() + wait_s
        while not self._begun or self._begun[-1].phase in _WAITING:
            reading = self._read()
            left_s = until_s - asyncio.get_running_loop().time()
            done, _ = await asyncio.wait({reading}, timeout=max(left_s, 0.0))
            if not done:
                return
            self._next = None
            step = reading.result()
            assert step is not None  # its end is no earlier than its result
            self._begun.append(step)

    async def steps(self) -> AsyncIterator[PullProgress]:
        """Yield every step, the last with the result.

        Raises:
            ShuttingDown: the gateway is leaving.
            MlxdError: it failed.
        """
        for step in self._begun:
            yield step
        left = asyncio.create_task(self._leaving.wait())
        try:
            while True:
                reading = self._read()
                await asyncio.wait({reading, left}, return_when=asyncio.FIRST_COMPLETED)
                if left.done():
                    raise ShuttingDown
                self._next = None
                later = reading.result()
                if later is None:
                    return
                yield later
        finally:
            left.cancel()

    async def aclose(self) -> None:
        """End what is left of it. Idempotent."""
        if self._next is not None:
            self._next.cancel()
            await asyncio.wait({self._next})
        await self._held.aclose()

    def _read(self) -> asyncio.Task[PullProgress | None]:
        """Return what reads the next step: one at a time, which no time-out cuts off."""
        if self._next is None:
            assert self._steps is not None, "begin it first"
            self._next = asyncio.create_task(next_of(self._steps))
        return self._next


def response_of(pull: Pull) -> OwningResponse:
    """Return the answer that streams a pull that was begun, and owns it."""
    return OwningResponse(_write(pull), pull.aclose, media_type=LINES)


async def _write(pull: Pull) -> AsyncIterator[bytes]:
    said: Line = {}
    try:
        async for step in pull.steps():
            for line in lines_of(step):
                if line != said:
                    yield write_line(line)
                said = line
    except MlxdError as error:
        yield write_line(error_body(failure_of(error)))


def lines_of(step: PullProgress) -> Iterator[Line]:
    """Return the lines that tell of a step, in the words of Ollama's own server."""
    match step.phase:
        case PullPhase.DOWNLOADING:
            kind, _, digits = step.file_digest.partition(":")
            status = f"pulling {digits[:_DIGITS] if kind == 'sha256' else step.file}"
            named = {"digest": step.file_digest} if step.file_digest else {}
            sizes = {"total": step.file_size_nbytes, "completed": step.file_done_nbytes}
            yield {"status": status, **named, **sizes}
        case PullPhase.VERIFYING:
            yield {"status": "verifying sha256 digest"}
        case PullPhase.DONE:
            yield {"status": "writing manifest"}
            yield {"status": "success"}
        case _:
            yield {"status": "pulling manifest"}


def name_on_hub(name: str) -> str:
    """Return what the hub itself calls a model that Ollama's clients ask for."""
    return without_hub(name).removesuffix(f":{LATEST}")
