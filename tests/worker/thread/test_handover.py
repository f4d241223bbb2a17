"""What the engine's thread hands over, and when: tokens of a crowd, and the interpreter to it."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from mlxd_shared.domain.devices import DeviceKind
from mlxd_shared.ops.backends import choose_backend, installed_versions
from mlxd_worker.engine.request import Tokens
from mlxd_worker.process.interpreter import SWITCH_INTERVAL_S
from mlxd_worker.thread.engine_thread import EngineThread
from mlxd_worker.thread.host import ModelHost
from mlxd_worker.thread.outbox import CROWD_STREAMS, StreamReader
from tests.worker.fresh_process import environment, run

STEPS_MAX = 200
"""Where none of so many steps is followed by another within HOLD_S, something else is wrong."""


@dataclass(slots=True)
class Crowd:
    """Streams that have a token each a step, and a gate before each step."""

    readers: list[StreamReader] = field(default_factory=list)
    at_the_gate: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    gate: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    busy: bool = True

    async def step(self) -> None:
        """Have one step done, and what it gave handed over or held."""
        self.gate.release()
        await self.reach_the_gate()

    async def reach_the_gate(self) -> None:
        """Wait until the engine is about to step; what it sent before has been delivered then."""
        await asyncio.to_thread(self.at_the_gate.acquire)

    async def count_arrived(self) -> int:
        """Return how many tokens the first reader has that it had not been asked for."""
        waiting = asyncio.ensure_future(self.readers[0].next())
        await asyncio.sleep(0)
        if not waiting.done():
            waiting.cancel()
            return 0
        return len(waiting.result().ids)


class CrowdHost(ModelHost):
    """Serves a crowd instead of a model."""

    def __init__(self, kind: DeviceKind, crowd: Crowd) -> None:
        super().__init__(device=kind)
        self._crowd = crowd
        self._steps = 0

    @property
    def busy(self) -> bool:
        """Whether the crowd goes on."""
        return self._crowd.busy

    def step(self) -> None:
        """Wait at the gate, then give each stream a token."""
        self._crowd.at_the_gate.release()
        self._crowd.gate.acquire()
        for reader in self._crowd.readers:
            reader.put(Tokens(self._steps, (100,), ""))
        self._steps += 1


@asynccontextmanager
async def serve_crowd(crowd: Crowd) -> AsyncIterator[EngineThread]:
    """Run an engine's thread on a crowd, up to its first step; stop it however the body ends."""
    engine = EngineThread(
        device=choose_backend(installed_versions(), platform=sys.platform).kind,
        loop=asyncio.get_running_loop(),
        on_fault=lambda: None,
        make_host=lambda kind: CrowdHost(kind, crowd),
    )
    crowd.readers += [engine.reader() for _ in range(CROWD_STREAMS)]
    engine.start()
    await crowd.reach_the_gate()
    try:
        yield engine
    finally:
        crowd.busy = False
        crowd.gate.release()
        await engine.stop()


@pytest.mark.asyncio
async def test_tokens_of_a_crowd_wait_while_its_streams_go_on_and_no_longer() -> None:
    """A step's tokens wait for those of the next ones; where no next one comes, they cross."""
    crowd = Crowd()
    async with serve_crowd(crowd) as engine:
        await crowd.step()
        assert await crowd.count_arrived() == 1, "first tokens cross at once"

        held = False
        for _ in range(STEPS_MAX):
            await crowd.step()
            held = not await crowd.count_arrived()
            if held:
                break
        assert held, f"no tokens waited, in {STEPS_MAX} steps"

        crowd.busy = False
        crowd.gate.release()
        await engine.ready()
        assert await crowd.count_arrived() == 2, "the tokens that were held, and the last"


OWN_INTERVAL = """
import json, os, signal, sys
from mlxd_worker.__main__ import run
from mlxd_worker.thread.engine_thread import _import_host
from mlxd_worker.process.options import parse_options

intervals_s = []

def make_host(kind):
    intervals_s.append(sys.getswitchinterval())
    os.kill(os.getpid(), signal.SIGTERM)
    return _import_host(kind)

code = run(parse_options([]), make_host=make_host)
print(json.dumps({"code": code, "intervals_s": intervals_s}))
"""


def test_the_engines_thread_soon_gets_the_interpreter() -> None:
    """In a worker the event loop keeps it for much less than a step, not for Python's 5 ms."""
    result = run(OWN_INTERVAL, environment())

    assert result == {"code": 0, "intervals_s": [pytest.approx(SWITCH_INTERVAL_S)]}
    assert SWITCH_INTERVAL_S <= 0.001
