"""Real workers that are killed, stopped or struck while they come and go; clients do not notice.

A few offsets of each kind; all of them are in tests/soak/test_kill_offsets.py.
"""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from mlxd_controller.core import phases
from tests.support.effort import spread_evenly
from tests.support.killed_streams import Killed, hear
from tests.support.struck import Struck, struck_controller
from tests.support.trained import DEMO
from tests.support.turns import turn_until

OFFSETS = spread_evenly((0, 1, 17, 64), 2)
SILENT_MAX_S = 5.0


async def until(struck: Struck, phase: type[phases.Phase]) -> None:
    """Wait until the model is in this phase."""
    with struck.runtime.changes.subscribe() as news:
        (model,) = struck.runtime.state.models.values()
        while not isinstance(model.phase, phase):
            model = await news.next()


@pytest.mark.asyncio
async def test_streams_go_on_after_a_kill() -> None:
    """Greedy, drawn, with stop strings, with a schema: ids, text and end as undisturbed."""
    async with struck_controller(DEMO) as struck:
        killed = Killed(DEMO, struck)
        await killed.begin()
        for offset in OFFSETS:
            await killed.kill(offset, killed.cases)
            await struck.unload()
    assert killed.streams == len(OFFSETS) * 4
    assert len(killed.ties) <= 1


@pytest.mark.asyncio
async def test_a_stream_goes_on_after_its_worker_hangs() -> None:
    """SIGSTOP: the worker answers nothing, is ended, and its stream has a new one."""
    async with struck_controller(DEMO, silent_max_s=SILENT_MAX_S) as struck:
        killed = Killed(DEMO, struck)
        await killed.begin("drawn")
        await killed.kill(20, killed.cases, number=signal.SIGSTOP)
        (dead,) = struck.runtime.workers.dead()
        assert dead.error is not None
        assert "did not answer" in dead.error.describe()
    assert not killed.ties


@pytest.mark.asyncio
async def test_kills_while_a_model_comes_and_goes() -> None:
    """A load that is killed is made again, and a stream ends well whose model is being unloaded."""
    async with struck_controller(DEMO) as struck:
        killed = Killed(DEMO, struck)
        await killed.begin("greedy")
        (case,), whole = killed.cases, killed.whole["greedy"]
        await struck.unload()
        asking = asyncio.create_task(hear(struck, case.request()))
        await until(struck, phases.Loading)
        await turn_until(lambda: struck.runtime.workers.live()[0].process is not None)
        os.kill(struck.pid, signal.SIGKILL)
        assert (await asking).ids == whole.ids

        blow = struck.strike(30, streams=2)  # the second stream is this test's own hand
        asking = asyncio.create_task(hear(struck, case.request(), blow=blow))
        await turn_until(lambda: blow.held > 0)
        (digest,) = struck.runtime.state.models
        unloading = asyncio.create_task(struck.runtime.unload(digest, grace_s=60.0, force=False))
        await until(struck, phases.Draining)
        struck.note_arrival(blow, held=False)
        assert await unloading == 0
        one = await asking
        assert (one.ids, one.text) == (whole.ids, whole.text)
        assert one.gap_s is not None
