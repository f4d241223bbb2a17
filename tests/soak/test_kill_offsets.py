"""A worker that is killed at any token loses that stream alone, honestly, and nothing after it."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest

from mlxd.v1 import inference_pb2, status_pb2, types_pb2
from mlxd_shared.errors import MlxdError, WorkerLost
from mlxd_shared.net import CHANNEL_OPTIONS
from mlxd_shared.status import from_call
from tests.support.served import served
from tests.support.tiny_model import write_tiny_model
from tests.system.wire.probe import Wire
from tests.system.wire.scenario import status_until
from tests.system.wire.walk import Recorder

TOKENS = 40
SIGNALS = (signal.SIGKILL, signal.SIGTERM)


@asynccontextmanager
async def controller(folder: Path) -> AsyncIterator[Wire]:
    """A real controller with one tiny model."""
    async with (
        served("--model", f"tiny={folder}") as server,
        grpc.aio.insecure_channel(server.address, options=list(CHANNEL_OPTIONS)) as channel,
    ):
        yield Wire(channel, Recorder(), "tiny", folder)


def ready_pid(status: status_pb2.Status) -> int | None:
    """Return the process that serves now."""
    found = [w.pid for w in status.workers if w.state == types_pb2.MODEL_STATE_READY]
    return found[0] if found else None


async def killed_at(wire: Wire, offset: int, number: signal.Signals) -> tuple[list[int], object]:
    """Stream, signal the worker once `offset` tokens have come; return the tokens and the error.

    Returns once the controller knows that the worker has ended.
    """
    await wire.ids(text="Once", max_tokens=1)
    pid = ready_pid(await status_until(wire, lambda s: ready_pid(s) is not None))
    assert pid is not None
    request = inference_pb2.GenerateRequest(
        model=wire.model,
        text="Once",
        sampling=types_pb2.SamplingOptions(temperature=0),
        ignore_eos=True,
        num_predict=0,
    )
    ids: list[int] = []
    sent = False
    error: MlxdError | None = None
    try:
        async for message in wire.inference.Generate(request):
            assert message.offset == len(ids)
            ids += message.token_ids
            if len(ids) >= offset and not sent:
                os.kill(pid, number)
                sent = True
    except grpc.aio.AioRpcError as caught:
        error = from_call(caught)
    await status_until(wire, lambda s: ready_pid(s) is None)
    return ids, error


@pytest.mark.asyncio
@pytest.mark.timeout(900)
@pytest.mark.parametrize("number", SIGNALS)
async def test_every_kill_offset(number: signal.Signals, tmp_path: Path) -> None:
    """No gap, no repeat, the error tells the offset, exit codes are clean, the next one serves."""
    folder = write_tiny_model(tmp_path / "tiny", context_max=2048)
    async with controller(folder) as wire:
        whole = await wire.ids(text="Once", max_tokens=TOKENS * 4, ignore_eos=True)
        for offset in range(1, TOKENS):
            ids, error = await killed_at(wire, offset, number)
            length = min(len(ids), len(whole))
            assert ids[:length] == whole[:length]
            if number is signal.SIGKILL:
                assert isinstance(error, WorkerLost), (offset, error)
                assert error.offset == len(ids) >= offset
            assert await wire.ids(text="Once", max_tokens=5, ignore_eos=True) == whole[:5]
        status = await wire.status.GetStatus(status_pb2.GetStatusRequest())
        codes = {w.exit_code for w in status.status.workers if w.HasField("exit_code")}
        assert codes == {-signal.SIGKILL if number is signal.SIGKILL else 0}
