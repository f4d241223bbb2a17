"""The client's generations: what is sent, what comes back, what is refused, what is cancelled."""

from __future__ import annotations

import asyncio
import math

import grpc
import pytest

from mlxd import (
    BrokenStream,
    Client,
    Completion,
    Delta,
    Finished,
    FinishReason,
    PositionLogprobs,
    RemoteError,
    SamplingOptions,
    TokenLogprob,
)
from mlxd.v1 import inference_pb2, types_pb2
from mlxd_shared.domain.errors import QueueFull
from tests.fakes import replies
from tests.fakes.mlxd_server import Answers, FakeServer, serving

LIMIT_S = 60.0


async def drain(client: Client) -> list[Delta | Finished]:
    """Read a whole generation."""
    async with client.generate("x") as stream:
        return [event async for event in stream]


def sent_request(fake: FakeServer) -> inference_pb2.GenerateRequest:
    """The one generate request that came."""
    (request,) = fake.requests
    assert isinstance(request, inference_pb2.GenerateRequest)
    return request


def sent_requests(fake: FakeServer) -> list[inference_pb2.GenerateRequest]:
    """All generate requests that came."""
    return [each for each in fake.requests if isinstance(each, inference_pb2.GenerateRequest)]


@pytest.mark.asyncio
async def test_generate_gives_deltas_and_one_end() -> None:
    """Each message with text or tokens is a Delta, the last also Finished with every figure."""
    async with serving(Answers(generate=replies.story())) as fake, Client(fake.address) as client:
        *deltas, finished = await drain(client)

    assert deltas == [
        Delta(0, "Once", (1,)),
        Delta(1, " upon", (2, 3)),
        Delta(3, " ä\n", (4,)),
    ]
    assert isinstance(finished, Finished)
    assert (finished.reason, finished.matched) == (FinishReason.LENGTH, None)
    assert (finished.request_id, finished.model_digest) == ("r-1", replies.DIGEST)
    usage = finished.usage
    assert (usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens) == (5, 2, 4)
    assert usage.cache_reason == "diverged"
    assert (usage.total_tokens, usage.seed) == (9, (1 << 64) - 1)
    assert usage.first_token_s == pytest.approx(0.261)
    assert usage.tokens_per_s == pytest.approx(6.0)


@pytest.mark.asyncio
async def test_log_probabilities_come_with_their_tokens() -> None:
    """Each token's entry is in its own Delta, with the best tokens and every token's bytes."""
    once, other = replies.logprob(1, -0.5, b"Once"), replies.logprob(2, -1.25, b"\xe3")
    first = replies.delta(0, "Once", 1)
    first.logprobs.add(chosen=once, top=[once, other])
    script = [first, replies.last(1)]
    async with serving(Answers(generate=script)) as fake, Client(fake.address) as client:
        (delta, _), whole = await drain(client), await client.complete("x", logprobs=2)

    best = TokenLogprob(1, -0.5, b"Once")
    position = PositionLogprobs(best, (best, TokenLogprob(2, -1.25, b"\xe3")))
    assert delta == Delta(0, "Once", (1,), (position,))
    assert whole.logprobs == (position,)


def of_choice(
    choice: int, *messages: inference_pb2.GenerateResponse
) -> list[inference_pb2.GenerateResponse]:
    """Messages of a stream as those of one of its choices."""
    for message in messages:
        message.choice = choice
    return [*messages]


@pytest.mark.asyncio
async def test_choices_are_told_apart() -> None:
    """Each counts its own tokens and has an end; completions come in the choices' order."""
    script = [
        *of_choice(1, replies.delta(0, "b", 1)),
        *of_choice(0, replies.delta(0, "a", 1), replies.last(1)),
        *of_choice(1, replies.delta(1, "c", 2), replies.last(2)),
    ]
    async with serving(Answers(generate=script)) as fake, Client(fake.address) as client:
        async with client.generate("x", n=2) as stream:
            events = [event async for event in stream]
        first, second = await client.choices("x", n=2)
    assert sent_requests(fake)[0].n == 2
    assert [event.choice for event in events] == [1, 0, 0, 1, 1]
    assert (first.text, second.text) == ("a", "bc")
    assert second.finished.choice == 1


@pytest.mark.asyncio
@pytest.mark.parametrize("script", [
    [*of_choice(0, replies.last(0))],
    [*of_choice(0, replies.last(0)), *of_choice(2, replies.last(0))],
    [*of_choice(0, replies.last(0)), *of_choice(1, replies.delta(0, "a", 1))],
])  # fmt: skip
async def test_choices_are_whole(script: list[inference_pb2.GenerateResponse]) -> None:
    """One that is missing, unknown or cut breaks the stream."""
    async with serving(Answers(generate=script)) as fake, Client(fake.address) as client:
        with pytest.raises(BrokenStream):
            await client.choices("x", n=2)


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("finish", "reason", "matched"),
    [
        (
            types_pb2.Finish(reason=types_pb2.FINISH_REASON_STOP_STRING, stop_string="."),
            "stop_string",
            ".",
        ),
        (types_pb2.Finish(reason=types_pb2.FINISH_REASON_EOS, stop_token_id=0), "eos", 0),
        (types_pb2.Finish(reason=types_pb2.FINISH_REASON_CONTEXT), "context", None),
    ],
)
async def test_the_end_says_what_matched(
    finish: types_pb2.Finish, reason: str, matched: str | int | None
) -> None:
    """A matched string or token reaches the caller, token 0 too."""
    answers = Answers(generate=[replies.last(0, finish=finish)])
    async with serving(answers) as fake, Client(fake.address) as client:
        (finished,) = await drain(client)

    assert isinstance(finished, Finished)
    assert (finished.reason.value, finished.matched) == (reason, matched)


@pytest.mark.asyncio
async def test_generate_sends_what_was_given_and_nothing_else() -> None:
    """Every argument arrives in its field; what was not given stays absent on the wire."""
    async with serving(Answers(generate=replies.story())) as fake, Client(fake.address) as client:
        await drain(client)
        plain = sent_request(fake)
        fake.requests.clear()
        async with client.generate(
            (7, 8),
            model="demo",
            sampling=SamplingOptions(
                temperature=0.0, top_k=-1, top_p=0.5, min_p=0.25, seed=3, logit_bias=((9, -1.5),)
            ),
            max_tokens=6,
            stop=["a", "b"],
            stop_token_ids=[11],
            ignore_eos=True,
            min_tokens=2,
            logprobs=4,
            skip_special_tokens=False,
            keep_alive_s=math.inf,
            request_id="mine",
        ) as stream:
            assert [event async for event in stream]
        full = sent_request(fake)

    assert plain == inference_pb2.GenerateRequest(text="x", sampling=types_pb2.SamplingOptions())
    assert {field.name for field, _ in full.ListFields()} == {
        "model", "tokens", "sampling", "max_tokens", "stop", "stop_token_ids", "ignore_eos",
        "min_tokens", "logprobs", "top_logprobs", "skip_special_tokens", "keep_alive", "request_id",
    }  # fmt: skip
    assert full.tokens.ids == [7, 8]
    assert full.sampling == types_pb2.SamplingOptions(
        temperature=0.0, top_k=-1, top_p=0.5, min_p=0.25, seed=3, logit_bias={9: -1.5}
    )
    assert (full.max_tokens, list(full.stop), list(full.stop_token_ids)) == (6, ["a", "b"], [11])
    assert (full.min_tokens, full.logprobs, full.top_logprobs) == (2, True, 4)
    assert (full.ignore_eos, full.skip_special_tokens) == (True, False)
    assert (full.keep_alive.seconds, full.request_id) == (-1, "mine")


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("script", "problem"),
    [
        ([], "it ended after 0 tokens without a finish"),
        ([replies.delta(0, "a", 1)], "it ended after 1 tokens without a finish"),
        ([replies.delta(0, "a", 1), replies.delta(2, "b", 2)], "gap: token 1 was due, 2 came"),
        ([replies.delta(0, "a", 1), replies.delta(0, "a", 1)], "repeat: token 1 was due, 0 came"),
        ([replies.delta(1, "a", 1)], "gap: token 0 was due, 1 came"),
        (
            [
                inference_pb2.GenerateResponse(
                    token_ids=[1, 2],
                    logprobs=[
                        inference_pb2.PositionLogprobs(chosen=replies.logprob(1, -0.5, b"a"))
                    ],
                )
            ],
            "1 log-probabilities for 2 tokens",
        ),
        ([replies.last(0), replies.delta(0, "b", 2)], "a message came after the end"),
        (
            [
                inference_pb2.GenerateResponse(
                    finish=types_pb2.Finish(reason=types_pb2.FINISH_REASON_EOS)
                )
            ],
            "the end carries no usage",
        ),
        (
            [inference_pb2.GenerateResponse(finish=types_pb2.Finish(), usage=types_pb2.Usage())],
            "finish reason 0 is unknown",
        ),
    ],
)
async def test_a_stream_that_is_not_whole_is_an_error(
    script: list[inference_pb2.GenerateResponse], problem: str
) -> None:
    """A missing end, a gap, a repeat, anything after the end: BrokenStream says which."""
    async with serving(Answers(generate=script)) as fake, Client(fake.address) as client:
        with pytest.raises(BrokenStream) as caught:
            await drain(client)

    assert caught.value.problem == problem


@pytest.mark.asyncio
async def test_a_broken_stream_is_cancelled() -> None:
    """The client does not leave a server generating for a stream that it has given up."""
    answers = Answers(generate=[replies.delta(5, "a", 1)], hold=True)
    async with serving(answers) as fake, Client(fake.address) as client:
        with pytest.raises(BrokenStream):
            await drain(client)
        await asyncio.wait_for(fake.left.wait(), LIMIT_S)


@pytest.mark.asyncio
async def test_leaving_the_block_cancels_the_call() -> None:
    """After `break` out of the block, the server's handler is cancelled, and reading is over."""
    answers = Answers(generate=[replies.delta(0, "a", 1)], hold=True)
    async with serving(answers) as fake, Client(fake.address) as client:
        async with client.generate("x") as stream:
            async for event in stream:
                assert event == Delta(0, "a", (1,))
                break
        await asyncio.wait_for(fake.left.wait(), LIMIT_S)

        assert [event async for event in stream] == []


@pytest.mark.asyncio
async def test_cancelling_the_reader_cancels_the_call() -> None:
    """A cancelled task raises CancelledError, and the server learns of it."""
    async with serving(Answers(hold=True)) as fake, Client(fake.address) as client:
        task = asyncio.create_task(drain(client))
        await asyncio.wait_for(fake.held.wait(), LIMIT_S)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.wait_for(fake.left.wait(), LIMIT_S)


@pytest.mark.asyncio
async def test_aclose_ends_a_reader_in_another_task() -> None:
    """A reader whose stream is closed elsewhere sees the end, not a cancellation."""
    async with serving(Answers(hold=True)) as fake, Client(fake.address) as client:
        stream = client.generate("x")

        async def read() -> list[Delta | Finished]:
            return [event async for event in stream]

        reader = asyncio.create_task(read())
        await asyncio.wait_for(fake.held.wait(), LIMIT_S)
        await stream.aclose()

        assert await asyncio.wait_for(reader, LIMIT_S) == []


@pytest.mark.asyncio
async def test_a_server_error_comes_back_as_its_class() -> None:
    """An error in the middle of a stream arrives after what came before, with its fields."""
    answers = Answers(generate=[replies.delta(0, "a", 1), QueueFull("streams", 7, 2.5)])
    seen: list[Delta | Finished] = []

    async def collect(client: Client) -> None:
        async with client.generate("x") as stream:
            async for event in stream:
                seen.append(event)  # noqa: PERF401 - what came before the error counts

    async with serving(answers) as fake, Client(fake.address) as client:
        with pytest.raises(QueueFull) as caught:
            await collect(client)

    assert seen == [Delta(0, "a", (1,))]
    error = caught.value
    assert (error.queue, error.limit, error.retry_after_s) == ("streams", 7, 2.5)


@pytest.mark.asyncio
async def test_a_deadline_and_a_dead_server_are_remote_errors() -> None:
    """The transport's own failures keep their code."""
    async with serving(Answers(hold=True)) as fake:
        async with Client(fake.address) as client:
            with pytest.raises(RemoteError) as late:
                async with client.generate("x", timeout_s=0.05) as stream:
                    assert [event async for event in stream]
        address = fake.address
    async with Client(address) as client:
        with pytest.raises(RemoteError) as dead:
            await client.status()

    assert late.value.code is grpc.StatusCode.DEADLINE_EXCEEDED
    assert dead.value.code is grpc.StatusCode.UNAVAILABLE


@pytest.mark.asyncio
async def test_complete_joins_a_stream() -> None:
    """The text, the tokens and the end of one stream in one value."""
    async with serving(Answers(generate=replies.story())) as fake, Client(fake.address) as client:
        completion = await client.complete("x", model="demo", max_tokens=4, stop=["."])

        assert sent_request(fake).stop == ["."]
    assert isinstance(completion, Completion)
    assert completion.text == "Once upon ä\n"
    assert completion.token_ids == (1, 2, 3, 4)
    assert completion.finished.reason is FinishReason.LENGTH


@pytest.mark.asyncio
async def test_an_empty_list_of_tokens_is_still_a_prompt() -> None:
    """The server is told which kind of prompt was empty, so that it can say so."""
    async with serving(Answers(generate=replies.story())) as fake, Client(fake.address) as client:
        await client.complete([])

        assert sent_request(fake).WhichOneof("prompt") == "tokens"
