"""A request whose worker has gone before its first message is served by another one."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable

import grpc
import pytest

from mlxd.v1 import inference_pb2
from mlxd_controller.services.losses import DEADLINE_MARGIN_S, model_wait_s
from mlxd_controller.services.quarantine import DEATHS_MAX, FORGET_S
from mlxd_shared import config
from mlxd_shared.domain.errors import (
    InvalidRequest,
    MlxdError,
    ModelDraining,
    PoisonPrompt,
    ShuttingDown,
    WorkerExited,
    WorkerLost,
    WrongWorker,
)
from mlxd_shared.wire.status import RemoteError, from_call
from tests.fakes.workers import Refusal
from tests.support.calls import error_of
from tests.support.controller_stack import ROOMY, Stack, controller_stack, request
from tests.support.turns import turn_until

SECRET = "unix:/run/secret/w.sock"
BROKEN = RemoteError(grpc.StatusCode.UNAVAILABLE, f"failed to connect to {SECRET}")


def worker_death(code: int = -9) -> Refusal:
    """Return a worker's end before a stream's first message."""
    return Refusal(BROKEN, code=code)


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
        assert messages[0].request_id
        assert messages[-1].usage.migrations == 0
        assert len(stack.workers.launcher.processes) == 2
        await stack.settle()
        assert not stack.model("a").leases


@pytest.mark.asyncio
async def test_a_worker_that_is_leaving_is_waited_for() -> None:
    """It refuses first and ends a moment later: the request goes to its successor."""
    async with controller_stack() as stack:
        await stack.generate()
        refusal = Refusal(ShuttingDown())
        stack.workers.script.refusals.append(refusal)
        asking = asyncio.create_task(stack.generate())
        await refusal.heard_of.wait()
        stack.workers.launcher.processes[0].end(0)

        assert len(await asking) == 4
        assert len(stack.workers.launcher.processes) == 2


@pytest.mark.asyncio
async def test_a_prompt_that_two_workers_died_of_is_refused() -> None:
    """No third worker dies of it; other prompts are served, and it is too once it is forgotten."""
    async with controller_stack() as stack:
        stack.workers.script.refusals += [worker_death() for _ in range(DEATHS_MAX)]
        call = stack.inference.Generate(request(text="poison"))
        error = await error_of(call)

        assert isinstance(error, PoisonPrompt)
        assert (error.deaths, error.retry_after_s) == (DEATHS_MAX, FORGET_S)
        assert await call.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert isinstance(
            await error_of(stack.inference.Generate(request(text="poison"))), type(error)
        )
        assert len(stack.workers.launcher.processes) == DEATHS_MAX
        assert len(await stack.generate(text="another")) == 4
        stack.clock.now += FORGET_S
        assert len(await stack.generate(text="poison")) == 4


@pytest.mark.asyncio
@pytest.mark.parametrize("after", [0, 2])
async def test_a_format_that_takes_too_long_is_its_clients_matter(after: int) -> None:
    """However often it comes: no other worker is tried, and the prompt is not held against it."""
    field = "response_format.ebnf_grammar"
    slow = InvalidRequest.of(field, "takes too long to follow: its masks, 9 so far, exceed 60 s")
    async with controller_stack() as stack:
        for _ in range(2 * DEATHS_MAX):
            stack.workers.script.refusals.append(Refusal(slow, after=after))
            call = stack.inference.Generate(request(text="slow"))
            error = await error_of(call)

            assert isinstance(error, InvalidRequest)
            assert error.violations == slow.violations
            assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
        (link,) = stack.workers.links
        assert len(link.requests) == 2 * DEATHS_MAX
        assert len(await stack.generate(text="slow")) == 4
        assert len(stack.workers.launcher.processes) == 1


@pytest.mark.asyncio
async def test_a_prompt_is_not_to_blame_where_somebody_kills_workers() -> None:
    """No process comes to SIGKILL by itself, but by want of memory; to other signals it does."""
    async with controller_stack(oom_kills=lambda _: 7) as stack:
        stack.workers.script.refusals += [worker_death() for _ in range(DEATHS_MAX)]
        assert len(await stack.generate(text="innocent")) == 4
        stack.clock.now += config.STEADY_S

        stack.workers.script.refusals += [worker_death(-11) for _ in range(DEATHS_MAX)]
        assert isinstance(
            await error_of(stack.inference.Generate(request(text="poison"))), PoisonPrompt
        )


@pytest.mark.asyncio
async def test_a_prompt_that_uses_up_the_memory_is_refused() -> None:
    """SIGKILL from the kernel, which counts those: the prompt may be to blame.

    Only those of the machine count that the worker runs on.
    """
    kills = itertools.count()
    async with controller_stack(
        oom_kills=lambda device: next(kills) if device == ROOMY.name else 0
    ) as stack:
        stack.workers.script.refusals += [worker_death() for _ in range(DEATHS_MAX)]
        error = await error_of(stack.inference.Generate(request(text="huge")))

        assert isinstance(error, PoisonPrompt)


@pytest.mark.asyncio
async def test_a_prompt_that_gets_on_is_cleared() -> None:
    """One death, a token, another death: nobody suspects it."""
    async with controller_stack() as stack:
        for _ in range(3):
            stack.workers.script.refusals.append(worker_death())
            assert len(await stack.generate()) == 4
            stack.clock.now += config.STEADY_S


@pytest.mark.asyncio
async def test_who_waited_behind_all_rows_is_not_suspected() -> None:
    """Two workers die with many prompts before them; those that had no row yet are served."""
    async with controller_stack() as stack:
        await stack.generate()
        script, links = stack.workers.script, stack.workers.links
        plan = stack.model("a").plan
        assert plan is not None
        script.tokens, script.endless = 0, True
        count = 3 * plan.rows_max
        asking = [asyncio.create_task(stack.generate(text=f"{i}")) for i in range(count)]
        await turn_until(lambda: len(links[0].requests) == 1 + count)
        stack.workers.launcher.processes[0].end(-9)
        free = count - plan.rows_max + 1  # and one of the suspects
        await turn_until(lambda: len(links) == 2 and len(links[1].requests) == free)
        script.tokens, script.endless = 3, False
        stack.workers.launcher.processes[1].end(-9)
        outcomes = await asyncio.gather(*asking, return_exceptions=True)

    errors = [
        from_call(outcome) for outcome in outcomes if isinstance(outcome, grpc.aio.AioRpcError)
    ]
    assert [type(error) for error in errors] == [PoisonPrompt]
    assert sum(isinstance(outcome, list) for outcome in outcomes) == count - 1


@pytest.mark.asyncio
async def test_who_is_beside_a_poison_prompt_is_served() -> None:
    """Two workers die of one prompt among many that have not begun either; it alone is refused."""
    async with controller_stack() as stack:
        await stack.generate()
        script, links = stack.workers.script, stack.workers.links
        script.first_gate.clear()
        others = [asyncio.create_task(stack.generate(text=f"{i}")) for i in range(2)]
        await turn_until(lambda: len(links[0].requests) == 3)
        script.poison = "poison"
        poison = asyncio.create_task(error_of(stack.inference.Generate(request(text="poison"))))
        others += [asyncio.create_task(stack.generate(text=f"late {i}")) for i in range(2)]
        await turn_until(lambda: len(links) > 1 and len(links[1].requests) > 0)
        await stack.settle()
        script.first_gate.set()

        assert [len(messages) for messages in await asyncio.gather(*others)] == [4] * 4
        error = await poison
        assert isinstance(error, PoisonPrompt)
        assert error.deaths == DEATHS_MAX
        assert len(stack.workers.launcher.processes) == DEATHS_MAX + 1


@pytest.mark.asyncio
async def test_a_suspect_that_hangs_does_not_keep_the_others_for_ever() -> None:
    """One whose client leaves gives its place to the next."""
    async with controller_stack() as stack:
        await stack.generate()
        script, links = stack.workers.script, stack.workers.links
        script.first_gate.clear()
        asking = [asyncio.create_task(stack.generate(text=f"{i}")) for i in range(2)]
        await turn_until(lambda: len(links[0].requests) == 3)
        stack.workers.launcher.processes[0].end(-9)
        await turn_until(lambda: len(links) == 2 and len(links[1].requests) == 1)
        await stack.settle()
        (first,) = links[1].requests
        asking[int(first.text)].cancel()
        await turn_until(lambda: len(links[1].requests) == 2)
        script.first_gate.set()

        assert len(await asking[1 - int(first.text)]) == 4


@pytest.mark.asyncio
async def test_one_death_counts_once_however_many_asked_the_same() -> None:
    """Ten requests with one prompt, whose worker dies once, are all served."""
    async with controller_stack() as stack:
        await stack.generate()
        script, (link,) = stack.workers.script, stack.workers.links
        script.tokens, script.endless = 0, True
        asking = [asyncio.create_task(stack.generate()) for _ in range(10)]
        await turn_until(lambda: len(link.requests) == 11)
        script.tokens, script.endless = 3, False
        stack.workers.launcher.processes[0].end(-9)
        streams = await asyncio.gather(*asking)

        assert [len(messages) for messages in streams] == [4] * 10
        assert len(stack.workers.launcher.processes) == 2


@pytest.mark.asyncio
async def test_a_death_is_remembered_of_a_request_that_may_not_move() -> None:
    """With migrate=false each client is told of the loss, until the prompt is known."""
    async with controller_stack() as stack:
        stack.workers.script.refusals += [worker_death() for _ in range(DEATHS_MAX)]
        errors = [
            await error_of(stack.inference.Generate(request(migrate=False)))
            for _ in range(DEATHS_MAX + 1)
        ]

        assert [type(error) for error in errors] == [WorkerLost, WorkerLost, PoisonPrompt]


@pytest.mark.asyncio
async def test_a_load_that_a_signal_ends_is_tried_once_more() -> None:
    """The request is served by the second; where that is killed too, its client hears of it."""
    async with controller_stack() as stack:
        stack.workers.script.load_gate.clear()
        asking = asyncio.create_task(stack.generate())
        await ended_while_loading(stack, count=1)
        stack.workers.script.load_gate.set()
        assert len(await asking) == 4

        await stack.unload("digest-a")
        stack.workers.script.load_gate.clear()
        refused = asyncio.create_task(error_of(stack.inference.Generate(request())))
        await ended_while_loading(stack, count=2)
        error = await refused
        assert isinstance(error, WorkerExited)
        assert error.code == -9


async def ended_while_loading(stack: Stack, *, count: int) -> None:
    """Kill so many workers in a row while they load."""
    for _ in range(count):
        links = len(stack.workers.links)
        await turn_until(lambda: len(stack.workers.links) > links)  # noqa: B023 - before it changes
        await turn_until(lambda: stack.workers.links[-1].at_gate)
        stack.workers.launcher.processes[-1].end(-9)
        stack.workers.script.load_gate.set()
        stack.workers.script.load_gate.clear()


@pytest.mark.asyncio
async def test_a_broken_connection_tells_no_client_where_workers_listen() -> None:
    """gRPC's own message names the socket; it is for the log."""
    async with controller_stack() as stack:
        stack.workers.script.refusals.append(Refusal(BROKEN, after=1))
        error = await error_of(stack.inference.Generate(request(migrate=False)))

        assert isinstance(error, WorkerLost)
        assert SECRET not in error.describe()


@pytest.mark.asyncio
@pytest.mark.parametrize("method", ["Tokenize", "Detokenize"])
async def test_texts_and_ids_are_asked_for_once_more(method: str) -> None:
    """The first worker has gone: the second one answers."""
    async with controller_stack() as stack:
        await stack.generate()
        ask: dict[str, Callable[[], grpc.aio.UnaryUnaryCall]] = {  # type: ignore[type-arg]
            "Tokenize": lambda: stack.inference.Tokenize(
                inference_pb2.TokenizeRequest(model="a", text="ab")
            ),
            "Detokenize": lambda: stack.inference.Detokenize(
                inference_pb2.DetokenizeRequest(model="a", token_ids=[97, 98])
            ),
        }
        stack.workers.script.last_words.append(-9)
        assert await ask[method]()
        assert len(stack.workers.launcher.processes) == 2
        stack.clock.now += config.STEADY_S
        stack.workers.script.last_words += [-9, -9]
        assert isinstance(await error_of(ask[method]()), WorkerLost)


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
