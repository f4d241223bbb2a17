"""A model over two ranks behind a real controller: a stream outlives a rank."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from mlxd import Client, Delta, SamplingOptions
from mlxd.v1 import types_pb2
from mlxd_worker.process.exit_code import ExitCode
from tests.support.cli import LIMIT_S
from tests.support.served import serve
from tests.support.tiny_model import write_tiny_model
from tests.support.worker_process import WorkerProcess, running_worker

ASKED: dict[str, Any] = {
    "sampling": SamplingOptions(temperature=0.0),
    "max_tokens": 300,
    "ignore_eos": True,
}


@asynccontextmanager
async def wait_for_model(worker: WorkerProcess) -> AsyncIterator[None]:
    """The worker has loaded its own model."""
    await worker.until(lambda own: own.state == types_pb2.MODEL_STATE_READY)
    yield


@pytest.mark.asyncio
async def test_a_stream_goes_on_when_a_rank_is_killed(tmp_path: Path) -> None:
    """Its ranks end together, and another worker goes on with it, token for token."""
    model = write_tiny_model(tmp_path / "a", context_max=1024)
    own = ("--ranks", "2", "--model", f"{model}", "--name", "a", "--log-level", "warning")
    async with (
        running_worker(*own, listen="tcp:127.0.0.1:0") as ranks,
        running_worker(listen="tcp:127.0.0.1:0") as one,
        wait_for_model(ranks),
        serve(
            f"--model=a={model}",
            f"--worker=ranks={ranks.address}",
            f"--worker=one={one.address}",
            "--reserve=1%",
        ) as server,
        Client(server.address, timeout_s=LIMIT_S) as client,
    ):
        whole = await client.complete("ab", model="a", **ASKED)
        assert (await ranks.own_status()).model_name == "a"
        (follower,) = [
            child.pid
            for child in psutil.Process(ranks.pid).children()
            if "mlxd_worker.distributed" in child.cmdline() and "warning" in child.cmdline()
        ]
        text = ""
        stream = client.generate("ab", model="a", **ASKED)
        async with stream as events:
            async for event in events:
                if not text:
                    os.kill(follower, signal.SIGKILL)
                if isinstance(event, Delta):
                    text += event.text
        assert text == whole.text
        assert await ranks.wait_ended() == ExitCode.ENGINE_FAILED
        assert (await one.own_status()).model_name == "a"
