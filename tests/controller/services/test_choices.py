"""Several choices of one prompt: a request each, their messages as they come, one end for all."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import grpc
import pytest
from google.protobuf.timestamp_pb2 import Timestamp

from mlxd.v1 import inference_pb2, types_pb2
from mlxd_controller.metrics.counters import Metrics
from mlxd_controller.services.choices import merge, split
from mlxd_controller.services.meter import Counts, Meter
from mlxd_shared import config
from mlxd_shared.domain.errors import DuplicateRequest, InvalidRequest, WorkerLost
from mlxd_shared.ops.metrics import labels
from tests.fakes.world import FakeClock
from tests.support.calls import error_of
from tests.support.controller_stack import controller_stack, request


def behind(
    request: inference_pb2.GenerateRequest, changes: inference_pb2.GenerateRequest
) -> inference_pb2.GenerateRequest:
    """Return the request as a worker reads it."""
    raw = request.SerializeToString() + changes.SerializeToString()
    return inference_pb2.GenerateRequest.FromString(raw)


def test_each_choice_is_a_request_of_its_own() -> None:
    """The first keeps id and seed, the others have ids and seeds behind them, also past the end.

    What it changes counts behind the request's own fields."""
    whole = inference_pb2.GenerateRequest(text="x", request_id="r", n=3)
    whole.sampling.seed = (1 << 64) - 2
    first, second, third = (behind(whole, changes) for changes in split(whole, "r", 3))

    assert [own.request_id for own in (first, second, third)] == ["r", "r.1", "r.2"]
    assert [own.choice for own in (first, second, third)] == [0, 1, 2]
    assert [own.sampling.seed for own in (first, second, third)] == [
        (1 << 64) - 2,
        (1 << 64) - 1,
        0,
    ]
    assert all((own.n, own.text) == (1, "x") for own in (first, second, third))
    drawn = split(inference_pb2.GenerateRequest(text="x", n=2), "r", 2)
    assert not any(own.sampling.HasField("seed") for own in drawn)


def test_all_choices_have_one_time() -> None:
    """Of a conversation that has none of its own."""
    whole = inference_pb2.GenerateRequest(n=2)
    whole.chat.messages.add(role="user", content="x")
    now = Timestamp(seconds=7)

    for changes in split(whole, "r", 2, now=now):
        read = behind(whole, changes)
        assert (read.chat.now, read.chat.messages[0].content) == (now, "x")
    assert not any(each.HasField("chat") for each in split(whole, "r", 2))


class Ended:
    """Streams that note their end."""

    def __init__(self) -> None:
        self.count = 0

    async def stream(
        self, *frames: bytes, fails: bool = False, waits: asyncio.Event | None = None
    ) -> AsyncGenerator[bytes, None]:
        """Yield frames; then fail, wait, or end."""
        try:
            for frame in frames:
                yield frame
            if waits is not None:
                await waits.wait()
            if fails:
                raise ValueError("bad")
        finally:
            self.count += 1


@pytest.mark.asyncio
async def test_messages_come_in_each_streams_order() -> None:
    """Nothing is lost, and every stream has ended with the whole."""
    ended = Ended()
    streams = [ended.stream(b"a1", b"a2", b"a3"), ended.stream(b"b1"), ended.stream()]
    frames = [frame async for frame in merge(streams)]

    assert [frame for frame in frames if frame.startswith(b"a")] == [b"a1", b"a2", b"a3"]
    assert sorted(frames) == [b"a1", b"a2", b"a3", b"b1"]
    assert ended.count == 3


@pytest.mark.asyncio
async def test_the_first_failure_ends_all() -> None:
    """Whoever still waits is ended, too."""
    ended = Ended()
    never = asyncio.Event()
    with pytest.raises(ValueError, match="bad"):
        async for _ in merge([ended.stream(b"a", waits=never), ended.stream(fails=True)]):
            pass
    assert ended.count == 2


@pytest.mark.asyncio
async def test_who_leaves_ends_all() -> None:
    """A client that goes leaves no stream behind."""
    ended = Ended()
    merged = merge([ended.stream(b"a", waits=asyncio.Event()) for _ in range(3)])
    await anext(merged)
    await merged.aclose()
    assert ended.count == 3


@pytest.mark.asyncio
async def test_a_worker_is_asked_for_each_choice() -> None:
    """With a request of its own; bad numbers are refused by name, before anybody is asked."""
    async with controller_stack() as stack:
        whole = request(request_id="r", n=3)
        messages = [message async for message in stack.inference.Generate(whole)]
        (link,) = stack.workers.links
        assert sorted(own.choice for own in link.requests) == [0, 1, 2]
        assert len(messages) == 3 * len(await stack.generate())
        for bad, field in (
            (request(n=0), "n"),
            (request(n=17), "n"),
            (request(choice=1), "choice"),
            (request(n=2, resume_from=1, resume_token_ids=[1]), "resume_from"),
        ):
            error = await error_of(stack.inference.Generate(bad))
            assert isinstance(error, InvalidRequest)
            assert error.violations[0].field == field
        assert messages[-1].finish.reason == types_pb2.FINISH_REASON_LENGTH


@pytest.mark.asyncio
async def test_what_is_sent_for_each_choice_is_bounded_whatever_was_parsed() -> None:
    """A text that a second one replaces is sent all the same: it counts, but for one choice."""
    async with controller_stack() as stack:
        generate: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = stack.channel.unary_stream(
            "/mlxd.v1.InferenceService/Generate"
        )
        replaced = request(text="a" * (5 << 20)).SerializeToString()

        error = await error_of(generate(replaced + request(n=16).SerializeToString()))
        assert isinstance(error, InvalidRequest)
        assert [each.field for each in error.violations] == ["n"]
        assert not stack.workers.links
        assert [frame async for frame in generate(replaced + request(n=1).SerializeToString())]


@pytest.mark.asyncio
async def test_the_ids_of_all_choices_are_held() -> None:
    """A request whose own id is that of another's choice is refused, either way round."""
    for held, other, clash in (
        (request(request_id="r", n=3), request(request_id="r.2"), "r.2"),
        (request(request_id="r.1"), request(request_id="r", n=2), "r.1"),
    ):
        async with controller_stack() as stack:
            stack.workers.script.endless = True
            running = stack.inference.Generate(held)
            await anext(aiter(running))
            error = await error_of(stack.inference.Generate(other))
            assert isinstance(error, DuplicateRequest)
            assert error.request_id == clash
            running.cancel()
            await stack.runtime.unload("digest-a", grace_s=60.0, force=False)
            stack.workers.script.endless = False
            assert [message async for message in stack.inference.Generate(other)]


@pytest.mark.asyncio
async def test_an_id_has_room_for_the_choices_numbers() -> None:
    """One that has none is refused by name; alone it is good."""
    long = "a" * (config.REQUEST_ID_CHARS_MAX - len(".15"))
    async with controller_stack() as stack:
        assert await stack.generate(request_id=long, n=2)
        assert await stack.generate(request_id=f"{long}b")
        error = await error_of(stack.inference.Generate(request(request_id=f"{long}b", n=2)))
        assert isinstance(error, InvalidRequest)
        assert [each.field for each in error.violations] == ["request_id"]


def last_of(prompt_tokens: int, tokens: int) -> inference_pb2.GenerateResponse:
    """Return a choice's last message."""
    message = inference_pb2.GenerateResponse()
    message.finish.reason = types_pb2.FINISH_REASON_LENGTH
    message.usage.prompt_tokens, message.usage.completion_tokens = prompt_tokens, tokens
    message.usage.cache_reason = types_pb2.CACHE_REASON_EVICTED
    return message


def test_what_all_choices_cost_is_counted() -> None:
    """The prompt and its look-up are the first one's, the tokens everybody's."""
    meter = Meter(metrics := Metrics(), FakeClock())
    with meter:
        meter.model = "a"
        for last in (last_of(5, 3), last_of(0, 4)):
            meter.complete(last)
    assert meter.counts == Counts(prompt_tokens=5, generated_tokens=7)
    assert metrics.generated_tokens.points == {labels(model="a"): 7.0}
    assert list(metrics.cache_misses.points.values()) == [1.0]
    (ended,) = metrics.requests.points
    assert dict(ended) == {"model": "a", "code": "OK", "finish_reason": "length"}


def test_a_choice_that_broke_off_is_how_all_ended() -> None:
    """What the others have come to is counted none the less."""
    meter = Meter(metrics := Metrics(), FakeClock())
    meter.model = "a"
    meter.complete(last_of(5, 3))
    meter.note_break(2, prompt_tokens=0)
    with pytest.raises(WorkerLost), meter:
        raise WorkerLost("a", 2, "killed")
    assert meter.counts == Counts(prompt_tokens=5, generated_tokens=5)
    (ended,) = metrics.requests.points
    assert dict(ended) == {"model": "a", "code": "UNAVAILABLE", "finish_reason": "none"}
