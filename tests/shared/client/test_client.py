"""mlxd.client against a scripted server: models, status, tokens, and what is refused at once."""

from __future__ import annotations

import datetime as dt
import math
import subprocess
import sys
from collections.abc import Awaitable, Callable
from importlib.metadata import version

import pytest

from mlxd import (
    BrokenStream,
    Client,
    KVFormat,
    LoadSpec,
    PulledModel,
    PullPhase,
    PullProgress,
    SamplingOptions,
    Weights,
)
from mlxd.messages import FitTerm, LogLines, MetricKind, ProcessRole
from mlxd.v1 import inference_pb2, model_pb2, types_pb2
from mlxd_shared.domain.chats import Chat, ChatMessage
from mlxd_shared.domain.errors import InvalidRequest, ModelNotFound, ModelTooLarge
from mlxd_shared.domain.figures import ModelState
from tests.fakes import replies
from tests.fakes.mlxd_server import Answers, FakeServer, serving


def sent_request(fake: FakeServer) -> inference_pb2.GenerateRequest:
    """The one generate request that came."""
    (request,) = fake.requests
    assert isinstance(request, inference_pb2.GenerateRequest)
    return request


LIMIT_S = 60.0


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
            lambda c: c.complete("x", sampling=SamplingOptions(repeat_last_n=1 << 31)),
            "sampling.repeat_last_n",
        ),
        (
            lambda c: c.complete("x", sampling=SamplingOptions(logit_bias=((-2, 1.0),))),
            "sampling.logit_bias",
        ),
        (lambda c: c.detokenize([1 << 32]), "token_ids"),
        (lambda c: c.complete("a\ud800"), "text"),
        (lambda c: c.complete("a", stop=["\udfff"]), "stop"),
        (lambda c: c.tokenize("\ud800"), "text"),
        (lambda c: c.embed(["a", "\ud800"]), "texts"),
        (lambda c: c.embed(["a"], dimensions=-1), "dimensions"),
        (
            lambda c: c.complete(Chat((ChatMessage("user", "a"), ChatMessage("user", "\ud800")))),
            "chat.messages[1].content",
        ),
        (
            lambda c: c.complete(Chat((ChatMessage("user", "a"),), tools_json=("{}", "\ud800"))),
            "chat.tools_json[1]",
        ),
        (lambda c: c.fit("m", options=LoadSpec(context_length=-1)), "options.context_length"),
        (lambda c: c.fit("m", options=LoadSpec(rows_max=-1)), "options.rows_max"),
        (lambda c: c.fit("m", options=LoadSpec(priority=1 << 31)), "options.priority"),
        (
            lambda c: c.fit("m", options=LoadSpec(prefix_cache_nbytes=-1)),
            "options.prefix_cache_bytes",
        ),
        (lambda c: c.fit("m", options=LoadSpec(keep_alive_s=1e12)), "options.keep_alive"),
        (lambda c: c.fit("m", options=LoadSpec(keep_alive_s=math.nan)), "options.keep_alive"),
        (lambda c: c.unload("m", grace_s=1e300), "grace"),
    ],
)
async def test_what_the_wire_cannot_carry_is_refused_by_name(
    call: Callable[[Client], Awaitable[object]], field: str
) -> None:
    """A number, or a text, that its field cannot hold is InvalidRequest, and nothing is sent."""
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
    assert (report.kv_format, report.prefix_cache_nbytes) == (KVFormat.Q8, 3 * replies.MIB)
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
async def test_logs_come_in_pieces_and_are_asked_for_by_their_fields() -> None:
    """What is not said stays absent; a number of lines that the wire cannot carry is refused."""
    pieces = [
        model_pb2.ReadLogsResponse(lines=["a", "b"], worker_incarnation="i", pid=7),
        model_pb2.ReadLogsResponse(lines=["z"], missed_lines=3, worker_incarnation="i", pid=7),
    ]
    async with serving(Answers(logs=pieces)) as fake, Client(fake.address) as client:
        async with client.read_logs("m") as whole:
            assert [piece async for piece in whole] == [
                LogLines(("a", "b"), 0, "i", 7), LogLines(("z",), 3, "i", 7)
            ]  # fmt: skip
        async with client.read_logs("m", tail=0, follow=True) as followed:
            assert len([piece async for piece in followed]) == 2
        with pytest.raises(InvalidRequest, match="tail: -1 is outside"):
            client.read_logs("m", tail=-1)

    assert fake.requests == [
        model_pb2.ReadLogsRequest(model="m"),
        model_pb2.ReadLogsRequest(model="m", tail=0, follow=True),
    ]


@pytest.mark.asyncio
async def test_forget_returns_what_names_are_left() -> None:
    """And raises the server's own error."""
    answer = model_pb2.ForgetModelResponse(names=["a", "b"])
    async with serving(Answers(forget=answer)) as fake, Client(fake.address) as client:
        assert await client.forget("c") == ("a", "b")
        fake.answers.forget = InvalidRequest.of("name", "unload it first")
        with pytest.raises(match="unload it first"):
            await client.forget("c")

    assert fake.requests == [model_pb2.ForgetModelRequest(name="c")] * 2


@pytest.mark.asyncio
async def test_models_reads_every_page() -> None:
    """The list is whole, in order, however small the server's pages are."""
    known = [replies.model(f"m{index}") for index in range(5)]
    async with serving(Answers(models=known)) as fake, Client(fake.address) as client:
        models = await client.models()
        one = await client.model("m0")

    assert [model.name for model in models] == ["m0", "m1", "m2", "m3", "m4"]
    assert len(fake.requests) == 4
    assert one == models[0]
    assert one.effective_sampling == SamplingOptions(temperature=0.5, top_k=40)
    assert one.last_used_time == dt.datetime.fromtimestamp(replies.NOON, dt.UTC)
    assert one.expire_time is None
    assert (one.kv_format, one.prefix_cache_nbytes) == (KVFormat.Q8, 3 * replies.MIB)


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
    assert (alive.kv_format, alive.prefix_cache_nbytes) == (KVFormat.Q8, 3 * replies.MIB)
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


def test_the_stubs_stand_alone() -> None:
    """Importing the generated messages, or the version, pulls in neither the client nor gRPC."""
    program = (
        "import sys, mlxd, mlxd.v1.inference_pb2\n"
        "print(mlxd.__version__, {'mlxd.client', 'grpc'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=LIMIT_S, check=True
    )

    assert done.stdout.split() == [version("mlxd"), "set()"]


@pytest.mark.asyncio
async def test_a_pull_is_whole_with_its_result() -> None:
    """Each step with its figures, the last with what was pulled; without it the stream is broken,
    and what no field can carry is refused before it is sent."""
    steps = replies.pull_steps("o/m")
    async with serving(Answers(pull=steps)) as fake, Client(fake.address) as client:
        async with client.pull("o/m", include=["*.md"]) as stream:
            seen = [step async for step in stream]
        with pytest.raises(InvalidRequest, match="include"):
            client.pull("o/m", include=["\ud800"])
    assert fake.requests == [model_pb2.PullModelRequest(model="o/m", include=["*.md"])]
    mib = replies.MIB
    digest = f"sha256:{'ab' * 32}"
    assert seen[1] == PullProgress(
        PullPhase.DOWNLOADING, "model.safetensors", digest, mib, 2 * mib, 2 * mib, 3 * mib
    )
    assert [step.phase for step in seen] == [
        PullPhase.LISTING, PullPhase.DOWNLOADING, PullPhase.VERIFYING, PullPhase.DONE,
    ]  # fmt: skip
    assert [step.pulled is None for step in seen] == [True, True, True, False]
    commit = "1" * 10 + "a" * 30
    assert seen[3].pulled == PulledModel(
        "o/m", "o/m", "main", commit, "/hub/snapshots/1", "d1", 2, 3 * mib
    )

    async with serving(Answers(pull=steps[:-1])) as fake, Client(fake.address) as client:
        with pytest.raises(BrokenStream):
            _ = [step async for step in client.pull("o/m")]
