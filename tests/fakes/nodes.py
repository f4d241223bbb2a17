"""Nodes of a fleet in this process: agents behind handles that a test cuts, and fake machines."""

from __future__ import annotations

import asyncio
import errno
import os
import pickle
from collections.abc import Callable, Mapping
from typing import Any

from mlxd_controller.fleet.agent import NodeAgent
from mlxd_controller.fleet.errors import NodeLost
from mlxd_controller.fleet.facts import AgentOptions
from mlxd_controller.fleet.node import NodeHandle
from tests.fakes.workers import FakeLauncher
from tests.fakes.world import FakeProbe
from tests.support.model_facts import device


class FakeMachine:
    """Implements Machine: every launcher is the one fake."""

    def __init__(self) -> None:
        self.workers = FakeLauncher()
        self.memory = FakeProbe(device(1 << 14))
        self.made = 0
        self.closed = 0

    def launcher(self, options: AgentOptions) -> FakeLauncher:
        """Return the fake; count how often it was asked for."""
        self.made += 1
        return self.workers

    def probe(self, options: AgentOptions) -> FakeProbe:
        """Return the fake."""
        return self.memory

    def close(self) -> None:
        """Count it."""
        self.closed += 1


class ShortMachine(FakeMachine):
    """A machine that lacks open files for so many launchers, one after another."""

    def __init__(self, *, refusals: int = 0) -> None:
        super().__init__()
        self.refusals = refusals

    def launcher(self, options: AgentOptions) -> FakeLauncher:
        """Return the fake, once the system does not refuse any more."""
        if self.refusals:
            self.refusals -= 1
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return super().launcher(options)


class NodeInside:
    """Implements NodeHandle: what crosses is pickled, and no caller's end ends a call there."""

    def __init__(self, agent: NodeAgent) -> None:
        self.agent = agent
        self.calls: list[str] = []
        self.is_silent = False
        self.released = 0
        self._cut: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._answered = asyncio.Event()

    async def call(self, method: str, epoch: int, *args: object) -> Any:
        """Pass a call on, unless the way is cut; of a silent node no answer comes."""
        if self._cut.done():
            raise NodeLost("cut")
        self.calls.append(method)
        if self.is_silent:
            await asyncio.Event().wait()
        crossed = pickle.loads(pickle.dumps(args))
        calling = asyncio.ensure_future(self.agent.call(method, epoch, *crossed))
        await asyncio.wait({calling, self._cut}, return_when=asyncio.FIRST_COMPLETED)
        if self.is_silent:
            await asyncio.Event().wait()
        if self._cut.done():
            raise NodeLost("cut")
        bug = calling.exception()
        if bug is not None:  # the agent lives, but its caller cannot tell
            raise NodeLost(repr(bug)) from bug
        answer = pickle.loads(pickle.dumps(calling.result()))
        self._answered.set()
        self._answered.clear()
        return answer

    async def release(self) -> None:
        """Count it."""
        self.released += 1

    def cut(self) -> None:
        """Fail all calls, also those under way."""
        self._cut.set_result(None)

    def mend(self) -> None:
        """Pass calls on again."""
        self.is_silent = False
        if self._cut.done():
            self._cut = asyncio.get_running_loop().create_future()

    async def until(self, holds: Callable[[], bool]) -> None:
        """Wait until something is so, as far as it follows from answers."""
        while not holds():
            await self._answered.wait()
            await asyncio.sleep(0)


class FixedMembership:
    """Implements Membership: the nodes that a test names."""

    def __init__(self, handles: Mapping[str, NodeHandle]) -> None:
        self.handles = dict(handles)

    async def look(self) -> Mapping[str, NodeHandle]:
        """Return the test's nodes."""
        return dict(self.handles)
