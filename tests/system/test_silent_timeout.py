"""`--worker-silent-timeout`: from the command line to the end of a worker that answers nothing."""

from __future__ import annotations

import asyncio
import math
import os
import signal

import pytest

from mlxd import Client, SamplingOptions
from mlxd_controller.settings import ServeSettings
from mlxd_shared import config
from tests.support.served import serve

LIMIT_S = 120.0
GREEDY = SamplingOptions(temperature=0.0)


@pytest.mark.asyncio
async def test_a_worker_is_ended_after_the_time_that_was_set() -> None:
    """Not after the default's: the log says for how long it gave no answer."""
    async with (
        asyncio.timeout(LIMIT_S),
        serve("--worker-silent-timeout", "3s") as server,
        Client(server.address) as client,
    ):
        before = await client.complete("Once", sampling=GREEDY, max_tokens=3)
        (worker,) = (await client.status()).workers
        os.kill(worker.pid, signal.SIGSTOP)
        after = await client.complete("Once", sampling=GREEDY, max_tokens=3)
        reason = server.find_logged("worker hangs; ending it")["reason"]

    assert after.token_ids == before.token_ids
    silent_s = float(reason.removeprefix("it did not answer for ").removesuffix(" s"))
    assert 3.0 <= silent_s < config.WORKER_SILENT_MAX_S


@pytest.mark.parametrize(("timeout_s", "silent_max_s"), [(0.0, math.inf), (3.0, 3.0)])
def test_nought_is_for_ever(timeout_s: float, silent_max_s: float) -> None:
    """As -1 is."""
    assert ServeSettings(worker_silent_timeout_s=timeout_s).silent_max_s == silent_max_s
