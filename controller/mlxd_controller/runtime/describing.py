"""What ranks have of a model is described off the event loop, when a plan says that it needs it.

Invariants:
- It is described once, however many ask. Requests that need it wait beside the mailbox, in their
  order, while others are decided; whoever leaves meanwhile is not decided on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeAlias

from mlxd_controller.core import events as ev
from mlxd_controller.runtime.ports import Survivor
from mlxd_models.fit.facts import Division, ModelFacts, Parts
from mlxd_models.fit.groups import split_group
from mlxd_shared.domain.errors import MlxdError
from mlxd_shared.domain.requests import LoadSpec

Request: TypeAlias = ev.Arrived | ev.LoadAsked


class LaterDivision(Division):
    """Parts that are read when somebody first needs them."""

    def __init__(self, read: Callable[[], Awaitable[Parts]]) -> None:
        """read: reads the model's files again, off the event loop; may raise MlxdError."""
        super().__init__()
        self._read = read
        self._turn = asyncio.Lock()

    async def describe(self) -> None:
        """Read the parts unless somebody has; what keeps them from being read is the problem."""
        async with self._turn:
            if self.described:
                return
            try:
                self.fill(await self._read())
            except MlxdError as error:
                self.fill(Parts(), problem=error.describe())


async def describe_for(facts: ModelFacts, spec: LoadSpec) -> None:
    """Describe what the ranks that a load asks for have, if it asks for several."""
    if spec.ranks is not None and spec.ranks > 1:
        await facts.division.describe()


async def describe_survivors(survivors: Iterable[Survivor]) -> None:
    """Describe what the ranks of these workers have, where there are several."""
    for survivor in survivors:
        if len(split_group(survivor.device)) > 1:
            await survivor.ref.facts.division.describe()


class PutOff:
    """Requests that wait until it is described what ranks have of their models."""

    def __init__(self, post: Callable[[ev.Event], None]) -> None:
        """post: puts an event into the mailbox."""
        self._post = post
        self._waiting: dict[Division, list[Request]] = {}

    def add(self, division: Division, request: Request) -> bool:
        """Have a request wait; return whether it is the first, for which `describe` is to run."""
        waiting = self._waiting.setdefault(division, [])
        waiting.append(request)
        return len(waiting) == 1

    async def describe(self, division: Division, *, still_wanted: Callable[[str], bool]) -> None:
        """Describe it, then post those requests again whose tickets are still wanted."""
        await division.describe()
        for request in self._waiting.pop(division):
            if still_wanted(request.ticket):
                self._post(request)
