"""A stream whose worker dies goes on with another: no gap, no repeat, one beginning, one end."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import replace

import grpc
import pytest

from mlxd.v1 import inference_pb2, status_pb2, types_pb2
from mlxd_controller.core import phases
from mlxd_controller.core.events import ShutDown
from mlxd_controller.services.quarantine import DEATHS_MAX
from mlxd_controller.services.relay import MOVES_MAX, QUEUED_MAX_S
from mlxd_shared import config
from mlxd_shared.domain.errors import (
    InvalidModel,
    MlxdError,
    ModelUnloaded,
    PoisonPrompt,
    QueueFull,
    ShuttingDown,
    WorkerLost,
)
from mlxd_shared.wire.status import RemoteError
from tests.fakes.workers import SEED, Refusal
from tests.support.calls import error_of, said_in_time
from tests.support.controller_stack import Stack, controller_stack, request
from tests.support.turns import turn_until

BROKEN = RemoteError(grpc.StatusCode.UNAVAILABLE, "Socket closed")
TOKENS = 6


def loss(after: int) -> Refusal:
    """Return a worker's death after so many tokens of the stream."""
    return Refusal(BROKEN, code=-9, after=after)


def full(after: int, retry_after_s: float = 0.0) -> Refusal:
    """Return a worker's refusal of a stream that would go on after so many tokens."""
    return Refusal(QueueFull("streams", 1, retry_after_s), after=after)


def check_whole(
    messages: Iterable[inference_pb2.GenerateResponse],
) -> inference_pb2.GenerateResponse:
    """Fail unless this is one whole stream; return its end."""
    messages = list(messages)
    ids: list[int] = []
    for message in messages:
        assert message.offset == len(ids)
        ids += message.token_ids
    assert ids == list(range(TOKENS))
    assert [bool(message.request_id) for message in messages] == [True] + [False] * TOKENS
    assert [message.HasField("seed") for message in messages] == [True] + [False] * TOKENS
    assert [message.HasField("finish") for message in messages] == [False] * TOKENS + [True]
    return messages[-1]


async def value(stack: Stack, name: str, **labels: str) -> float:
    """Return a counter's value, 0 where it has not counted."""
    status = (await stack.status.GetStatus(status_pb2.GetStatusRequest())).status
    points = [point for family in status.metrics if family.name == name for point in family.points]
    return sum(p.value for p in points if labels.items() <= dict(p.labels).items())


@pytest.mark.asyncio
@pytest.mark.parametrize("after", range(1, TOKENS + 1))
async def test_a_stream_goes_on_where_its_worker_died(after: int) -> None:
    """The next worker is given the tokens so far and the seed; the client sees one stream."""
    async with controller_stack() as stack:
        stack.workers.script.tokens = TOKENS
        stack.workers.script.refusals.append(loss(after))
        last = check_whole(await stack.generate(max_tokens=TOKENS + 1))

        first, second = (link.requests[0] for link in stack.workers.links)
        assert not first.HasField("resume_from")
        assert second.resume_from == after
        assert list(second.resume_token_ids) == list(range(after))
        assert second.sampling.seed == SEED
        assert (second.text, second.request_id) == (first.text, first.request_id)
        assert last.usage.migrations == 1
        await stack.settle()
        assert not stack.model("a").leases


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "error", [BROKEN, ModelUnloaded("a"), ShuttingDown()], ids=["killed", "unloaded", "stopped"]
)
async def test_a_stream_is_whole_once_its_finish_has_arrived(error: MlxdError) -> None:
    """A worker that goes before the call's status has lost nothing: no other one is asked."""
    async with controller_stack() as stack:
        stack.workers.script.tokens = TOKENS
        stack.workers.script.refusals.append(Refusal(error, code=-9, after=TOKENS + 1))
        last = check_whole(await stack.generate(max_tokens=TOKENS))

        assert last.usage.migrations == 0
        assert len(stack.workers.launcher.processes) == 1
        assert await value(stack, "mlxd_requests_total", code="OK") == 1
        assert await value(stack, "mlxd_generation_tokens_total", model="a") == TOKENS
        await stack.settle()
        assert not stack.model("a").leases


@pytest.mark.asyncio
async def test_metrics_count_a_moved_stream_once() -> None:
    """Its tokens and its prompt once, the move by whether the stream had begun."""
    async with controller_stack() as stack:
        stack.workers.script.tokens = TOKENS
        stack.workers.script.refusals += [loss(0), loss(2)]
        check_whole(await stack.generate())

        assert await value(stack, "mlxd_migrations_total", model="a", type="new_request") == 1
        assert await value(stack, "mlxd_migrations_total", model="a", type="ongoing_request") == 1
        assert await value(stack, "mlxd_generation_tokens_total", model="a") == TOKENS
        assert await value(stack, "mlxd_prompt_tokens_total", model="a") == 1
        assert await value(stack, "mlxd_requests_total", code="OK") == 1


@pytest.mark.asyncio
async def test_what_the_client_had_before_is_carried_on_and_not_counted() -> None:
    """A stream that its client resumed may move as well; its tokens count where they were made."""
    async with controller_stack() as stack:
        stack.workers.script.tokens = TOKENS
        stack.workers.script.refusals.append(loss(4))
        request_before = inference_pb2.GenerateRequest(resume_from=2, resume_token_ids=[0, 1])
        messages = await stack.generate(
            resume_from=request_before.resume_from, resume_token_ids=request_before.resume_token_ids
        )

        assert [i for message in messages for i in message.token_ids] == list(range(2, TOKENS))
        assert [link.requests[0].resume_from for link in stack.workers.links] == [2, 4]
        assert list(stack.workers.links[1].requests[0].resume_token_ids) == [0, 1, 2, 3]
        assert await value(stack, "mlxd_generation_tokens_total", model="a") == TOKENS - 2


@pytest.mark.asyncio
async def test_a_seed_of_the_client_is_kept() -> None:
    """The one in force is the one that was asked for."""
    async with controller_stack() as stack:
        stack.workers.script.refusals.append(loss(1))
        await stack.generate(sampling=types_pb2.SamplingOptions(seed=5))
        assert [link.requests[0].sampling.seed for link in stack.workers.links] == [5, 5]


@pytest.mark.asyncio
@pytest.mark.parametrize("shift", [-1, 1])
async def test_a_worker_that_leaves_a_gap_or_repeats_delivers_nothing(shift: int) -> None:
    """A resumed stream that begins elsewhere is a loss; its message never comes."""
    async with controller_stack() as stack:
        stack.workers.script.refusals.append(loss(2))
        stack.workers.script.shift = shift
        call = stack.inference.Generate(request())
        messages = [await anext(aiter(call)) for _ in range(2)]
        error = await error_of(call)

        assert [m.offset for m in messages] == [0, 1]
        assert isinstance(error, WorkerLost)
        assert error.offset == 2
        assert error.cause == f"a message begins at token {2 + shift}, after 2 tokens"
        await stack.settle()
        assert not stack.model("a").leases


@pytest.mark.asyncio
async def test_a_stream_may_ask_not_to_move() -> None:
    """migrate=false: WORKER_LOST with how far it came and why; the next request is served."""
    async with controller_stack() as stack:
        stack.workers.script.refusals.append(loss(1))
        error = await error_of(stack.inference.Generate(request(migrate=False)))

        assert isinstance(error, WorkerLost)
        assert (error.offset, error.cause) == (1, "signal 9")
        assert len(stack.workers.launcher.processes) == 1
        assert await value(stack, "mlxd_migrations_total") == 0
        assert await value(stack, "mlxd_generation_tokens_total", model="a") == 1
        assert len(await stack.generate()) == 4


@pytest.mark.asyncio
async def test_a_worker_that_is_told_to_go_hands_its_streams_on() -> None:
    """ShuttingDown in mid-stream, and then its end: not the server's, and no loss to the client."""
    async with controller_stack() as stack:
        stack.workers.script.tokens = TOKENS
        refusal = Refusal(ShuttingDown(), code=0, after=3)
        stack.workers.script.refusals += [refusal, replace(refusal, after=5)]
        check_whole(await stack.generate())
        stack.clock.now += config.STEADY_S
        stack.workers.script.refusals.append(refusal)
        error = await error_of(stack.inference.Generate(request(migrate=False)))
        assert isinstance(error, WorkerLost)
        assert error.offset == 3


@pytest.mark.asyncio
async def test_deaths_without_progress_end_a_stream() -> None:
    """What it has come to may be what kills; with a token between them deaths do not add up."""
    async with controller_stack() as stack:
        stack.workers.script.tokens = TOKENS
        stack.workers.script.refusals += [loss(2) for _ in range(DEATHS_MAX + 1)]
        error = await error_of(stack.inference.Generate(request()))
        assert isinstance(error, PoisonPrompt)
        assert len(stack.workers.launcher.processes) == DEATHS_MAX + 1


@pytest.mark.asyncio
async def test_moves_are_bounded() -> None:
    """However steadily a stream gets on, it is not sent to worker after worker for ever."""
    async with controller_stack() as stack:
        stack.workers.script.tokens = MOVES_MAX * 2
        losses = [loss(after) for after in range(1, MOVES_MAX + 2)]
        stack.workers.script.refusals += losses
        call = asyncio.create_task(error_of(stack.inference.Generate(request())))
        for each in losses:
            await each.heard_of.wait()
            stack.pass_time(config.STEADY_S)  # so that the next one is started at once
        error = await call
        assert isinstance(error, WorkerLost)
        assert error.offset == MOVES_MAX + 1


@pytest.mark.asyncio
async def test_a_full_worker_is_asked_again() -> None:
    """The stream has begun: it waits for its place, and is not refused as a new one is."""
    async with controller_stack() as stack:
        stack.workers.script.tokens = TOKENS
        stack.workers.script.refusals += [loss(2), full(2), full(2)]
        last = check_whole(await stack.generate())
        assert last.usage.migrations == 1
        assert len(stack.workers.links[1].requests) == 3
        assert await value(stack, "mlxd_migrations_total") == 1
        stack.workers.script.refusals.append(full(0))
        assert isinstance(await error_of(stack.inference.Generate(request())), QueueFull)


@pytest.mark.asyncio
@pytest.mark.parametrize(("timeout_s", "retry_after_s"), [(30.0, 31.0), (None, QUEUED_MAX_S + 1)])
async def test_no_place_in_time_is_a_loss(timeout_s: float | None, retry_after_s: float) -> None:
    """No wait is begun that its client would not see the end of, nor one beyond the bound."""
    async with controller_stack() as stack:
        stack.workers.script.refusals += [loss(2), full(2, retry_after_s)]
        error = await error_of(stack.inference.Generate(request(), timeout=timeout_s))
        assert isinstance(error, WorkerLost)
        assert error.offset == 2
        assert "streams" in error.cause


@pytest.mark.asyncio
async def test_what_the_scheduler_refuses_to_a_stream_that_has_begun_is_its_loss() -> None:
    """The client hears how far it came, and why it could not go on."""
    async with controller_stack() as stack:
        await stack.generate()
        stack.workers.script.load_error = InvalidModel("a tensor too many")
        stack.workers.script.refusals.append(loss(2))
        error = await error_of(stack.inference.Generate(request()))
        assert isinstance(error, WorkerLost)
        assert (error.offset, error.cause) == (2, "a tensor too many")


async def ended_while_it_waits(timeout_s: float | None) -> MlxdError | None:
    """End a stream that waits for its next worker; return what its client hears of a deadline."""
    error = None
    async with controller_stack() as stack:
        await stack.generate()
        stack.workers.script.load_gate.clear()
        stack.workers.script.refusals.append(loss(1))
        call = stack.inference.Generate(request(), timeout=timeout_s)
        await anext(aiter(call))
        await stack.until("a", phases.Loading)
        if timeout_s is None:
            call.cancel()
        else:
            error = await error_of(call)
        await turn_until(lambda: not stack.model("a").waiters)
        stack.workers.script.load_gate.set()
        await stack.until("a", phases.Ready)
        await stack.settle()
        assert not stack.model("a").leases
        assert not stack.model("a").waiters
    return error


@pytest.mark.asyncio
async def test_a_client_may_leave_while_its_stream_waits_for_the_next_worker() -> None:
    """No lease and no wait is left."""
    assert await ended_while_it_waits(None) is None


@pytest.mark.asyncio
async def test_a_deadline_may_come_while_a_stream_waits_for_its_next_worker() -> None:
    """The client hears of it before; no lease and no wait is left."""

    async def hear_deadline() -> MlxdError:
        error = await ended_while_it_waits(1.0)
        assert error is not None
        return error

    error = await said_in_time(hear_deadline)
    assert isinstance(error, WorkerLost)
    assert "loading" in error.cause


@pytest.mark.asyncio
@pytest.mark.parametrize("waiting", [False, True])
async def test_an_operators_unload_ends_a_stream_for_good(*, waiting: bool) -> None:
    """By force, in the middle or while it waits for its next worker: it is not carried on."""
    async with controller_stack() as stack:
        stack.workers.script.endless = True
        call = stack.inference.Generate(request())
        messages = aiter(call)
        for _ in range(3):
            await anext(messages)
        if waiting:
            stack.workers.script.load_gate.clear()
            stack.workers.launcher.processes[0].end(-9)
            await stack.until("a", phases.Loading)
        await stack.unload("digest-a")
        error = await error_of(call)
        assert isinstance(error, ModelUnloaded)
        assert len(stack.workers.launcher.processes) == 1 + waiting
        assert isinstance(stack.model("a").phase, phases.Unloaded)
        stack.workers.script.load_gate.set()


@pytest.mark.asyncio
async def test_a_stream_goes_on_though_its_model_is_being_unloaded() -> None:
    """A gentle unload lets streams end; one whose worker dies meanwhile ends well all the same."""
    async with controller_stack() as stack:
        script = stack.workers.script
        script.tokens, script.endless = TOKENS, True
        call = stack.inference.Generate(request())
        messages = aiter(call)
        got = [await anext(messages) for _ in range(TOKENS)]
        unloading = asyncio.create_task(
            stack.runtime.unload("digest-a", grace_s=600.0, force=False)
        )
        await stack.until("a", phases.Draining)
        script.endless = False
        stack.workers.launcher.processes[0].end(-9)
        assert await unloading == 0
        check_whole([*got, *[message async for message in messages]])


@pytest.mark.asyncio
@pytest.mark.parametrize("waiting", [False, True])
async def test_a_shutdown_moves_nothing(*, waiting: bool) -> None:
    """The server is going: its streams hear that, also while they wait for their next worker."""
    async with controller_stack() as stack:
        stack.workers.script.endless = True
        call = stack.inference.Generate(request())
        await anext(aiter(call))
        if waiting:
            stack.workers.script.load_gate.clear()
            stack.workers.launcher.processes[0].end(-9)
            await stack.until("a", phases.Loading)
        stack.runtime.post(ShutDown(0.0))
        assert isinstance(await error_of(call), ShuttingDown)
        assert len(stack.workers.launcher.processes) == 1 + waiting
