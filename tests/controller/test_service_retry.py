"""A Generate whose worker has gone before its first message is served by another one, once."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from mlxd_controller.services.inference import DEADLINE_MARGIN_S, model_wait_s
from mlxd_shared import config
from mlxd_shared.errors import MlxdError, ModelDraining, ShuttingDown, WorkerLost, WrongWorker
from mlxd_shared.status import RemoteError
from tests.fakes.workers import Refusal
from tests.support.calls import error_of
from tests.support.controller_stack import controller_stack, request

SECRET = "unix:/run/secret/w.sock"
BROKEN = RemoteError(grpc.StatusCode.UNAVAILABLE, f"failed to connect to {SECRET}")


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "error", [BROKEN, ShuttingDown(), ModelDraining("a"), WrongWorker("d", "i-9")]
)
async def test_a_worker_gone_before_its_first_message_is_replaced(error: MlxdError) -> None:
    """The client sees one whole stream; the second worker was launched for it."""
    async with controller_stack() as stack:
        await stack.generate()
        stack.workers.script.refusals.append(Refusal(error, code=-9))
        messages = await stack.generate()

        assert [i for message in messages for i in message.token_ids] == [0, 1, 2]
        assert len(stack.workers.launcher.processes) == 2
        assert not stack.model("a").leases


@pytest.mark.asyncio
async def test_a_worker_that_is_leaving_is_waited_for() -> None:
    """It refuses first and ends a moment later: the request goes to its successor."""
    async with controller_stack() as stack:
        await stack.generate()
        refusal = Refusal(ShuttingDown())
        stack.workers.script.refusals.append(refusal)
        asking = asyncio.create_task(stack.generate())
        await refusal.told.wait()
        stack.workers.launcher.processes[0].end(0)

        assert len(await asking) == 4
        assert len(stack.workers.launcher.processes) == 2


@pytest.mark.asyncio
async def test_the_second_worker_is_the_last() -> None:
    """A request that meets two dying workers is lost: it may be what ends them."""
    async with controller_stack() as stack:
        stack.workers.script.refusals += [Refusal(BROKEN, code=-9), Refusal(BROKEN, code=-11)]
        error = await error_of(stack.inference.Generate(request()))

        assert isinstance(error, WorkerLost)
        assert (error.offset, error.cause) == (0, "signal 11")
        assert len(stack.workers.launcher.processes) == 2
        assert len(await stack.generate()) == 4


@pytest.mark.asyncio
async def test_after_the_first_message_a_lost_worker_is_lost() -> None:
    """What was delivered is not delivered again."""
    async with controller_stack() as stack:
        stack.workers.script.refusals.append(Refusal(BROKEN, code=-9, after=1))
        error = await error_of(stack.inference.Generate(request()))

        assert isinstance(error, WorkerLost)
        assert (error.offset, error.cause) == (1, "signal 9")
        assert len(stack.workers.launcher.processes) == 1


@pytest.mark.asyncio
async def test_a_broken_connection_tells_no_client_where_workers_listen() -> None:
    """gRPC's own message names the socket; it is for the log."""
    async with controller_stack() as stack:
        stack.workers.script.refusals.append(Refusal(BROKEN, after=1))
        error = await error_of(stack.inference.Generate(request()))

        assert isinstance(error, WorkerLost)
        assert SECRET not in error.describe()


@pytest.mark.parametrize(
    ("remaining_s", "wait_s"),
    [
        (None, config.LOAD_TOTAL_TIMEOUT_S),
        (10.0, 10.0 - DEADLINE_MARGIN_S),
        (DEADLINE_MARGIN_S, DEADLINE_MARGIN_S / 2),
        (0.0, 0.0),
    ],
)
def test_a_short_deadline_leaves_time_for_a_ready_model(
    remaining_s: float | None, wait_s: float
) -> None:
    """The margin for saying why is never all the time that there is."""
    assert model_wait_s(remaining_s) == wait_s
