"""When a silent node is lost, to the second: on a loop whose clock follows a script."""

from __future__ import annotations

import asyncio
import importlib.metadata
import math
from dataclasses import replace
from typing import Any

import pytest

from mlxd_controller.fleet.facts import Launched, NodeReport
from mlxd_controller.fleet.probe import Fleet
from mlxd_controller.runtime.ports import END_WITH_MACHINE
from mlxd_shared import config
from mlxd_shared.ops.machine import memory_of, this_machine
from tests.fakes.nodes import FixedMembership
from tests.support.fleets import LIMIT_S, OPTIONS
from tests.support.scripted_loops import Script, run

VERSION = importlib.metadata.version("mlxd")


class Fading:
    """Implements NodeHandle: answers at once, until a moment after which no answer comes."""

    def __init__(self, until_s: float) -> None:
        self.answered_s = -math.inf
        """When the last answer came."""
        self._until_s = until_s

    async def call(self, method: str, epoch: int, *args: object) -> Any:
        """Answer as a node without devices does."""
        loop = asyncio.get_running_loop()
        if method == "ended" or loop.time() > self._until_s:
            await asyncio.Event().wait()
        self.answered_s = loop.time()
        if method == "take":
            return ()
        if method != "report":
            return None
        memory = memory_of(this_machine("a"), resident_nbytes=0)
        return NodeReport(VERSION, devices=(), memory=memory, oom_kills=0)

    async def release(self) -> None:
        """Do nothing."""


@pytest.mark.parametrize("until_s", [0.0, 20.2])
def test_silence_begins_with_the_last_answer(until_s: float) -> None:
    """Not with the question that found none: the node is lost FLEET_SILENT_S after the answer."""
    script = Script()

    async def work() -> float:
        handle = Fading(until_s)
        options = replace(OPTIONS, silent_s=config.FLEET_SILENT_S)
        fleet = Fleet(FixedMembership({"a": handle}), options, epoch=1)
        await fleet.muster(start_s=LIMIT_S)
        (node,) = fleet.nodes.values()
        worker = fleet.launcher.adopt(node, "m", Launched("i-1", 1, ""))
        following = asyncio.create_task(fleet.run())
        assert await worker.wait_exited() == END_WITH_MACHINE
        silent_s = asyncio.get_running_loop().time() - handle.answered_s
        following.cancel()
        await asyncio.wait({following})
        assert node.reason == f"no answer for {config.FLEET_SILENT_S:.0f} s"
        return silent_s

    assert run(script, work) == pytest.approx(config.FLEET_SILENT_S)
