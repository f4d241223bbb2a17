"""mlxd.client against a scripted server: what it sends, what it gives back, what it refuses."""

from __future__ import annotations

import asyncio
import datetime as dt
import math
from collections.abc import Awaitable, Callable

import grpc
import pytest

from mlxd.client import (
    BrokenStream,
    Client,
    Completion,
    Delta,
    Finished,
    FinishReason,
    LoadSpec,
    RemoteError,
    SamplingOptions,
    Weights,
)
from mlxd.messages import FitTerm, MetricKind, ModelState, ProcessRole
from mlxd.v1 import inference_pb2, model_pb2, types_pb2
from mlxd_shared.errors import InvalidRequest, ModelNotFound, ModelTooLarge, QueueFull
from tests.fakes import replies
from tests.fakes.mlxd_server import Answers, FakeServer, serving

LIMIT_S = 10.0


async def drain(client: Client) -> list[Delta | Finished]:
    """Read a whole generation."""
    async with client.generate("x") as stream:
        return [event async for event in stream]


def sent(fake: FakeServer) -> inference_pb2.GenerateRequest:
    """The one generate request that came."""
    (request,) = fake.requests
    assert isinstance(request, inference_pb2.GenerateRequest)
    return request


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
    assert (usage.total_tokens, usage.seed) == (9, (1 << 64) - 1)
    assert usage.first_token_s == pytest.approx(0.261)
    assert usage.tokens_per_s == pytest.approx(6.0)


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
        plain = sent(fake)
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
            skip_special_tokens=False,
            keep_alive_s=math.inf,
            request_id="mine",
        ) as stream:
            assert [event async for event in stream]
        full = sent(fake)

    assert plain == inference_pb2.GenerateRequest(text="x", sampling=types_pb2.SamplingOptions())
    assert {field.name for field, _ in full.ListFields()} == {
        "model", "tokens", "sampling", "max_tokens", "stop", "stop_token_ids", "ignore_eos",
        "skip_special_tokens", "keep_alive", "request_id",
    }  # fmt: skip
    assert full.tokens.ids == [7, 8]
    assert full.sampling == types_pb2.SamplingOptions(
        temperature=0.0, top_k=-1, top_p=0.5, min_p=0.25, seed=3, logit_bias={9: -1.5}
    )
    assert (full.max_tokens, list(full.stop), list(full.stop_token_ids)) == (6, ["a", "b"], [11])
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

        assert sent(fake).stop == ["."]
    assert isinstance(completion, Completion)
    assert completion.text == "Once upon ä\n"
    assert completion.token_ids == (1, 2, 3, 4)
    assert completion.finished.reason is FinishReason.LENGTH


@pytest.mark.asyncio
async def test_tokenize_and_detokenize() -> None:
    """Both send their flags only where given, and return plain values."""
    async with (
        serving(Answers(token_ids=[1, 2], text="ab")) as fake,
        Client(fake.address) as client,
    ):
        assert await client.tokenize("ab", model="m", add_special_tokens=False) == (1, 2)
        assert await client.detokenize([1, 2], model="m") == "ab"

    assert fake.requests == [
        inference_pb2.TokenizeRequest(model="m", text="ab", add_special_tokens=False),
        inference_pb2.DetokenizeRequest(model="m", token_ids=[1, 2]),
    ]


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("call", "field"),
    [
        (lambda c: c.complete([-1]), "tokens.ids"),
        (lambda c: c.complete("x", max_tokens=1 << 31), "max_tokens"),
        (lambda c: c.complete("x", sampling=SamplingOptions(seed=-1)), "sampling.seed"),
        (lambda c: c.complete("x", sampling=SamplingOptions(top_k=1 << 31)), "sampling.top_k"),
        (
            lambda c: c.complete("x", sampling=SamplingOptions(logit_bias=((-2, 1.0),))),
            "sampling.logit_bias",
        ),
        (lambda c: c.detokenize([1 << 32]), "token_ids"),
        (lambda c: c.fit("m", options=LoadSpec(context_length=-1)), "options.context_length"),
        (lambda c: c.fit("m", options=LoadSpec(rows_max=-1)), "options.rows_max"),
    ],
)
async def test_what_the_wire_cannot_carry_is_refused_by_name(
    call: Callable[[Client], Awaitable[object]], field: str
) -> None:
    """A number that its field cannot hold is InvalidRequest, and nothing is sent."""
    async with serving(Answers()) as fake, Client(fake.address) as client:
        with pytest.raises(InvalidRequest) as caught:
            await call(client)

    assert [violation.field for violation in caught.value.violations] == [field]
    assert fake.requests == []


@pytest.mark.asyncio
async def test_load_streams_updates_until_ready() -> None:
    """Each step arrives; the options are sent as given."""
    spec = LoadSpec(
        context_length=512, weights=Weights.STORED, keep_alive_s=0.0, pinned=True,
        sampling=SamplingOptions(temperature=0.1),
    )  # fmt: skip
    async with (
        serving(Answers(load=replies.load_steps())) as fake,
        Client(fake.address) as client,
        client.load("/models/demo", name="demo", options=spec) as updates,
    ):
        seen = [update async for update in updates]

    assert [update.model.state for update in seen] == [
        ModelState.LOADING,
        ModelState.LOADING,
        ModelState.READY,
    ]
    assert seen[0].fit is not None
    assert seen[1].fit is None
    assert seen[0].model.progress.bytes_read * 2 == seen[0].model.progress.bytes_total
    (request,) = fake.requests
    assert isinstance(request, model_pb2.LoadModelRequest)
    assert (request.model, request.name, request.validate_only) == ("/models/demo", "demo", False)
    assert request.options.context_length == 512
    assert not request.options.HasField("rows_max")
    assert request.options.HasField("keep_alive")
    assert request.options.sampling == types_pb2.SamplingOptions(temperature=0.1)


@pytest.mark.asyncio
async def test_a_load_that_does_not_end_ready_is_an_error() -> None:
    """An orderly end in another state is a broken stream; an error is that error."""
    async with (
        serving(Answers(load=replies.load_steps()[:2])) as fake,
        Client(fake.address) as client,
    ):
        with pytest.raises(BrokenStream, match="state loading"):
            async with client.load("demo") as updates:
                assert [update async for update in updates]
        fake.answers.load = [ModelTooLarge("demo", 5, 4, 1)]
        with pytest.raises(ModelTooLarge) as caught:
            async with client.load("demo") as updates:
                assert [update async for update in updates]

    assert (caught.value.need_bytes, caught.value.budget_bytes) == (5, 4)


@pytest.mark.asyncio
async def test_fit_only_reckons() -> None:
    """validate_only is set, the whole report comes back, and its absence is an error."""
    step = model_pb2.LoadModelResponse(fit=replies.fit(now=False, evict=("other",)))
    async with serving(Answers(load=[step])) as fake, Client(fake.address) as client:
        report = await client.fit("demo")
        fake.answers.load = []
        with pytest.raises(BrokenStream, match="without a fit report"):
            await client.fit("demo")

    assert (report.fits_now, report.fits_ever, report.would_evict) == (False, True, ("other",))
    assert report.terms[0] == FitTerm("weights", 10 * replies.MIB, "float32 of 8-bit")
    assert sum(term.nbytes for term in report.terms) == report.need_nbytes
    assert report.weights is Weights.FLOAT32
    request = fake.requests[0]
    assert isinstance(request, model_pb2.LoadModelRequest)
    assert request.validate_only


@pytest.mark.asyncio
async def test_unload_sends_grace_and_force() -> None:
    """An absent grace stays absent; the answer tells how many streams were ended."""
    answer = model_pb2.UnloadModelResponse(model=replies.model(state="UNLOADED"), streams_aborted=2)
    async with serving(Answers(unload=answer)) as fake, Client(fake.address) as client:
        unloaded = await client.unload("demo")
        await client.unload("demo", grace_s=1.5, force=True)
        await client.unload("demo", grace_s=math.inf)
        fake.answers.unload = ModelNotFound("demo", "try another")
        with pytest.raises(ModelNotFound, match="no model 'demo': try another"):
            await client.unload("demo")

    assert (unloaded.model.state, unloaded.streams_aborted) == (ModelState.UNLOADED, 2)
    plain, forced, patient, _ = fake.requests
    assert plain == model_pb2.UnloadModelRequest(model="demo")
    assert isinstance(forced, model_pb2.UnloadModelRequest)
    assert (forced.grace.ToMilliseconds(), forced.force) == (1500, True)
    assert isinstance(patient, model_pb2.UnloadModelRequest)
    assert patient.grace.seconds == -1


@pytest.mark.asyncio
async def test_models_reads_every_page() -> None:
    """The list is whole, in order, however small the server's pages are."""
    known = [replies.model(f"m{index}") for index in range(5)]
    async with serving(Answers(models=known)) as fake, Client(fake.address) as client:
        found = await client.models()
        one = await client.model("m0")

    assert [model.name for model in found] == ["m0", "m1", "m2", "m3", "m4"]
    assert len(fake.requests) == 4
    assert one == found[0]
    assert one.effective_sampling == SamplingOptions(temperature=0.5, top_k=40)
    assert one.last_used_time == dt.datetime.fromtimestamp(replies.NOON, dt.UTC)
    assert one.expire_time is None


@pytest.mark.asyncio
async def test_watches_go_on_until_they_are_left() -> None:
    """Each change of a model, and each status, is one item."""
    answers = Answers(models=[replies.model()], statuses=[replies.status()] * 2, hold=True)
    async with serving(answers) as fake, Client(fake.address) as client:
        async with client.watch_models("demo") as changes:
            change = await anext(changes)
        async with client.watch_status(interval_s=0.25) as statuses:
            first, second = await anext(statuses), await anext(statuses)

        assert (change.name, change.state) == ("demo", ModelState.READY)
        assert first == second == await client.status()


@pytest.mark.asyncio
async def test_status_carries_every_figure() -> None:
    """Host, devices, workers with their accounts, and metrics, as plain values."""
    async with (
        serving(Answers(statuses=[replies.status()])) as fake,
        Client(fake.address) as client,
    ):
        status = await client.status("demo")

    assert (status.role, status.pid, status.version) == (ProcessRole.CONTROLLER, 4242, "9.8.7")
    assert status.host_memory.resident_nbytes == 70 * replies.MIB
    assert status.devices[0].budget_nbytes == 1 << 32
    alive, dead = status.workers
    assert alive.exit_code is None
    assert dead.exit_code == -9
    assert dead.last_lines == ("going down",)
    assert alive.memory.accounts[0].nbytes == alive.memory.total_nbytes
    assert alive.memory.unaccounted_nbytes == -64
    assert alive.memory.devices == {"cpu": 12 * replies.MIB}
    assert alive.math_library.name == "OpenBLAS"
    (family,) = status.metrics
    assert family.kind is MetricKind.HISTOGRAM
    assert family.points[0].labels == {"model": "demo"}
    assert family.points[0].histogram is not None
    assert family.points[0].histogram.counts == (3, 2, 1)


def test_a_bad_address_is_refused_at_once() -> None:
    """An address of no known form never reaches the resolver."""
    with pytest.raises(InvalidRequest, match="is not unix:PATH or HOST:PORT"):
        Client("nonsense")
