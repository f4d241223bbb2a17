"""The client's streams that go on after a loss: what is asked again, and what ends them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest

from mlxd import BrokenStream, Client, Delta, Finished, RemoteError, SamplingOptions
from mlxd._resuming import ResumingCall
from mlxd._streams import GenerationReader, Stream
from mlxd.v1 import inference_pb2, types_pb2
from mlxd_shared import config
from mlxd_shared.domain import errors
from mlxd_shared.domain.errors import DuplicateRequest, MlxdError, ShuttingDown, WorkerLost
from tests.fakes import replies
from tests.fakes.mlxd_server import Answers, FakeServer, serving
from tests.support.clocks import Clock

LIMIT_S = 60.0
SEED = 1 << 63
PROMPT_TOKENS = 4
LOST = WorkerLost("demo", 1)
Message = inference_pb2.GenerateResponse


def begin_message(offset: int, text: str, *token_ids: int, digest: str = replies.DIGEST) -> Message:
    """The first message of a call."""
    message = replies.delta(offset, text, *token_ids)
    message.request_id, message.model_digest, message.seed = f"r-{offset}", digest, SEED
    message.prompt_tokens = PROMPT_TOKENS
    return message


async def read(client: Client, **options: Any) -> list[Delta | Finished]:
    """Read a whole generation that reconnects."""
    async with client.generate("x", reconnect=True, **options) as stream:
        return [event async for event in stream]


def sent_requests(fake: FakeServer) -> list[inference_pb2.GenerateRequest]:
    """The requests that came."""
    assert all(isinstance(r, inference_pb2.GenerateRequest) for r in fake.requests)
    return [r for r in fake.requests if isinstance(r, inference_pb2.GenerateRequest)]


@pytest.mark.asyncio
async def test_a_stream_goes_on_where_it_was_lost() -> None:
    """The next call has the tokens so far and the seed; its consumer sees one stream, and how many
    calls it took.
    """
    answers = Answers(
        generate=[begin_message(0, "a", 1), replies.delta(1, "b", 2, 3), LOST],
        generate_again=[
            [begin_message(3, "c", 4), LOST],
            [begin_message(4, "d", 5), replies.last(5, text="e", token_ids=(6,))],
        ],
    )
    options: dict[str, Any] = {"sampling": SamplingOptions(temperature=0.5), "max_tokens": 6}
    async with serving(answers) as fake, Client(fake.address) as client:
        *deltas, finished = await read(client, **options)

    assert [(d.offset, d.text, d.token_ids) for d in deltas if isinstance(d, Delta)] == [
        (0, "a", (1,)), (1, "b", (2, 3)), (3, "c", (4,)), (4, "d", (5,)), (5, "e", (6,)),
    ]  # fmt: skip
    assert [d.seed for d in deltas if isinstance(d, Delta)] == [SEED, None, None, None, None]
    lengths = [d.prompt_tokens for d in deltas if isinstance(d, Delta)]
    assert lengths == [PROMPT_TOKENS, None, None, None, None]
    assert isinstance(finished, Finished)
    assert (finished.request_id, finished.model_digest) == ("r-0", replies.DIGEST)
    assert (finished.usage.calls.lost, finished.usage.calls.resumed_tokens) == (2, 4)
    assert finished.usage.tokens_per_s == pytest.approx(1 / 0.5)
    first, second, third = sent_requests(fake)
    assert first == inference_pb2.GenerateRequest(
        text="x", max_tokens=6, sampling=types_pb2.SamplingOptions(temperature=0.5)
    )
    again = inference_pb2.GenerateRequest()
    again.CopyFrom(first)
    again.sampling.seed = SEED
    again.resume_from = 3
    again.resume_token_ids.extend([1, 2, 3])
    assert second == again
    again.resume_from = 4
    again.resume_token_ids.append(4)
    assert third == again


@pytest.mark.asyncio
async def test_what_had_not_begun_is_asked_for_as_it_was() -> None:
    """Without a token nothing is resumed, and no seed is made up."""
    answers = Answers(generate=[ShuttingDown(0.01)], generate_again=[replies.story()])
    async with serving(answers) as fake, Client(fake.address) as client:
        *deltas, _ = await read(client)

    first, second = sent_requests(fake)
    assert first == second
    assert not second.HasField("resume_from")
    assert len(deltas) == 3


@pytest.mark.asyncio
async def test_our_own_stream_may_still_be_in_flight() -> None:
    """A server that has not noticed the loss refuses the id; that passes."""
    answers = Answers(
        generate=[begin_message(0, "a", 1), LOST],
        generate_again=[[DuplicateRequest("mine")], [begin_message(1, "b", 2), replies.last(2)]],
    )
    async with serving(answers) as fake, Client(fake.address) as client:
        *deltas, _ = await read(client, request_id="mine")

    assert [d.token_ids for d in deltas if isinstance(d, Delta)] == [(1,), (2,)]
    assert [r.request_id for r in sent_requests(fake)] == ["mine"] * 3


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("error", "options"),
    [
        (errors.InvalidRequest.of("text", "too long"), {}),
        (errors.ModelNotFound("demo"), {}),
        (errors.ModelDraining("demo"), {}),
        (errors.ModelUnloaded("demo"), {}),
        (errors.PoisonPrompt("demo", 2, 60.0), {}),
        (errors.DuplicateRequest("mine"), {}),
        (LOST, {"migrate": False}),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, MlxdError) else str(value),
)
async def test_what_a_server_means_is_not_asked_again(
    error: MlxdError, options: dict[str, Any]
) -> None:
    """Only a loss is survived; anything else ends the stream at once."""
    async with serving(Answers(generate=[error])) as fake, Client(fake.address) as client:
        with pytest.raises(type(error)):
            await read(client, **options)

    assert len(sent_requests(fake)) == 1


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("rest", "problem"),
    [
        ([begin_message(0, "a", 1)], "repeat: token 1 was due, 0 came"),
        ([begin_message(2, "c", 3)], "gap: token 1 was due, 2 came"),
        ([begin_message(1, "b", 2, digest="other")], "the model has changed"),
    ],
)
async def test_a_server_that_goes_on_otherwise_is_found_out(
    rest: Sequence[Message], problem: str
) -> None:
    """Offsets and the model are checked across calls, too."""
    answers = Answers(generate=[begin_message(0, "a", 1), LOST], generate_again=[rest])
    async with serving(answers) as fake, Client(fake.address) as client:
        with pytest.raises(BrokenStream, match=problem):
            await read(client)


@pytest.mark.asyncio
async def test_a_program_resumes_by_itself() -> None:
    """`resume` and `migrate` arrive in their fields, and offsets go on from there."""
    answers = Answers(generate=[begin_message(2, "c", 3), replies.last(3)])
    async with serving(answers) as fake, Client(fake.address) as client:
        options: dict[str, Any] = {"sampling": SamplingOptions(seed=9), "resume": (1, 2)}
        async with client.generate("x", migrate=False, **options) as stream:
            delta, finished = [event async for event in stream]
        async with client.generate("x", resume=(1,)) as stream:
            with pytest.raises(BrokenStream, match="gap: token 1 was due, 2 came"):
                await anext(stream)
        with pytest.raises(errors.InvalidRequest, match="resume_token_ids"):
            client.generate("x", resume=(-1,))

    assert delta == Delta(2, "c", (3,), seed=SEED, prompt_tokens=PROMPT_TOKENS)
    assert isinstance(finished, Finished)
    assert (finished.usage.calls.lost, finished.usage.calls.resumed_tokens) == (0, 2)
    request = sent_requests(fake)[0]
    assert (request.resume_from, list(request.resume_token_ids)) == (2, [1, 2])
    assert (request.HasField("migrate"), request.migrate) == (True, False)


@dataclass(slots=True)
class Scripted:
    """Calls that a script answers: a message, or the code with which one breaks off."""

    script: list[Message | grpc.StatusCode]
    timeouts: list[float | None] = field(default_factory=list)
    lost: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once one has broken off."""

    def start(self, request: object, timeout_s: float | None) -> Any:
        """Begin one."""
        del request
        self.timeouts.append(timeout_s)
        return self

    async def read(self) -> object:
        """Return what is next."""
        if not self.script:
            return grpc.aio.EOF
        item = self.script.pop(0)
        if isinstance(item, Message):
            return item
        self.lost.set()
        metadata = grpc.aio.Metadata()
        raise grpc.aio.AioRpcError(item, metadata, metadata, details="gone")

    def cancel(self) -> bool:
        """End it."""
        return True


async def run_script(
    script: list[Message | grpc.StatusCode], *, tick_s: float, timeout_s: float | None = None
) -> tuple[list[Delta | Finished], Scripted]:
    """Read a stream over scripted calls, with a clock that runs by itself."""
    clock = Clock(0.0, tick_s=tick_s)
    calls = Scripted(script)
    request = inference_pb2.GenerateRequest(text="x")
    call = ResumingCall(calls.start, request, timeout_s=timeout_s, clock=clock)
    return [event async for event in Stream(call, GenerationReader())], calls


LOST_CODE = grpc.StatusCode.UNAVAILABLE


@pytest.mark.asyncio
async def test_a_server_that_is_gone_for_too_long_is_given_up() -> None:
    """The window is of time without a token: each token opens it anew."""
    tick_s = config.RECONNECT_WINDOW_S * 0.3
    alive: list[Message | grpc.StatusCode] = [
        LOST_CODE,
        begin_message(0, "a", 1),
        LOST_CODE,
        begin_message(1, "b", 2),
        LOST_CODE,
    ]
    events, calls = await run_script(
        [*alive, begin_message(2, "c", 3), replies.last(3)], tick_s=tick_s
    )
    assert (len(events), len(calls.timeouts)) == (4, 4)

    gone: list[Message | grpc.StatusCode] = [begin_message(0, "a", 1), *[LOST_CODE] * 20]
    with pytest.raises(RemoteError) as caught:
        await run_script(gone, tick_s=tick_s)
    assert caught.value.code is LOST_CODE
    assert 15 <= len(gone) < 19


@pytest.mark.asyncio
async def test_other_failures_of_the_transport_end_a_stream() -> None:
    """A deadline, or a cancellation by the server, is no loss."""
    for code in (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED):
        with pytest.raises(RemoteError) as caught:
            await run_script([begin_message(0, "a", 1), code, begin_message(1, "b", 2)], tick_s=0.0)
        assert caught.value.code is code


@pytest.mark.asyncio
async def test_all_calls_share_one_deadline() -> None:
    """A further call gets what is left of the time, at last none."""
    script: list[Message | grpc.StatusCode] = [begin_message(0, "a", 1), LOST_CODE, LOST_CODE]
    _, calls = await run_script(
        [*script, begin_message(1, "b", 2), replies.last(2)], tick_s=1, timeout_s=6
    )
    first, second, third = calls.timeouts
    assert first == 6
    assert second is not None
    assert third is not None
    assert 6 > second > third >= 0


@pytest.mark.asyncio
async def test_leaving_a_lost_stream_ends_it() -> None:
    """A consumer that goes away during a pause is not kept, and nothing more is asked."""
    clock = Clock(0.0)
    calls = Scripted([begin_message(0, "a", 1), LOST_CODE, begin_message(1, "b", 2)])
    call = ResumingCall(
        calls.start, inference_pb2.GenerateRequest(text="x"), timeout_s=None, clock=clock
    )
    stream = Stream(call, GenerationReader())
    assert isinstance(await anext(stream), Delta)

    async def rest() -> list[Delta | Finished]:
        return [event async for event in stream]

    reader = asyncio.create_task(rest())
    await calls.lost.wait()  # its next turn comes before the end of the pause, however long it took
    await stream.aclose()

    assert await asyncio.wait_for(reader, LIMIT_S) == []
    assert (len(calls.timeouts), len(calls.script)) == (1, 1)


@pytest.mark.asyncio
async def test_a_cancellation_as_the_pause_ends_is_one() -> None:
    """Whichever the reader's turn finds first: nothing more is asked."""
    loop, calls = asyncio.get_running_loop(), Scripted([LOST_CODE, begin_message(0, "a", 1)])
    request = inference_pb2.GenerateRequest(text="x")
    call = ResumingCall(calls.start, request, timeout_s=None, clock=Clock(0.0))
    reading = asyncio.create_task(call.read())
    await calls.lost.wait()
    cancelling = loop.call_later(config.RECONNECT_PAUSE_MIN_S, call.cancel)
    while loop.time() < cancelling.when():
        pass  # the loop stands still until both are due, the end of the pause first

    with pytest.raises(asyncio.CancelledError):
        await reading
    assert len(calls.timeouts) == 1


@pytest.mark.asyncio
async def test_a_loss_behind_the_end_is_none() -> None:
    """What has finished is whole, whatever becomes of the connection; nothing more is asked."""
    events, calls = await run_script(
        [begin_message(0, "a", 1), replies.last(1), LOST_CODE], tick_s=0.0
    )
    assert isinstance(events[-1], Finished)
    assert len(calls.timeouts) == 1
