"""A model as an engine, over a real controller with fake workers and real gRPC."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import grpc
import pytest
from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto.generated import common_pb2

from mlxd_controller.core import phases
from mlxd_controller.router.engine import Engine
from mlxd_controller.store.shelves import demo_model
from mlxd_shared import config
from mlxd_shared.domain.errors import (
    DuplicateRequest,
    FieldNotServed,
    InvalidRequest,
    MlxdError,
    ModelNotFound,
    QueueFull,
)
from mlxd_shared.wire.admission import Room
from mlxd_shared.wire.interceptors import Context
from mlxd_shared.wire.status import RemoteError
from tests.fakes.store import FakeStore
from tests.fakes.workers import Refusal
from tests.support.calls import error_of
from tests.support.controller_stack import Stack, controller_stack
from tests.support.model_facts import facts
from tests.support.router_doors import engines_of, services_of

LONG_S = 600.0


@dataclass(slots=True)
class Scene:
    """A controller of one model, and its engine."""

    stack: Stack
    store: FakeStore
    engine: Any

    async def generate(self, **fields: Any) -> list[Any]:
        """Return a whole answer."""
        return [answer async for answer in self.engine.Generate(ask(**fields))]


@asynccontextmanager
async def scene_of(folder: Path, *, calls_max: int = config.CALLS_MAX) -> AsyncIterator[Scene]:
    """Serve the made-up model `a` at a router's door around the body."""
    store = FakeStore({"a": ("digest-a", facts(10))})
    async with (
        controller_stack(store=store) as stack,
        engines_of(stack, store, folder, calls_max=calls_max) as (engine,),
    ):
        yield Scene(stack, store, engine)


def ask(**fields: Any) -> Any:
    """Return a request for a stream of ids."""
    request = pb.GenerateRequest(tokenized=pb.TokenizedInput(input_ids=[1, 2]), stream=True)
    request.MergeFrom(pb.GenerateRequest(**fields))
    return request


@pytest.mark.asyncio
async def test_a_cold_model_is_loaded_and_streamed(tmp_path: Path) -> None:
    """By the request, whose ids are the prompt; chunks, then one end."""
    async with scene_of(tmp_path) as scene:
        answers = await scene.generate(request_id="r-1")

        assert [i for a in answers for i in a.chunk.token_ids] == [0, 1, 2]
        assert [a.WhichOneof("response") for a in answers] == ["chunk"] * 3 + ["complete"]
        assert answers[-1].complete.finish_reason == "length"
        (link,) = scene.stack.workers.links
        assert list(link.requests[0].tokens.ids) == [1, 2]
        assert link.requests[0].request_id == "r-1"


@pytest.mark.asyncio
async def test_choices_are_interleaved_under_their_numbers(tmp_path: Path) -> None:
    """Each is a stream of its own, with a seed that follows from the request's."""
    async with scene_of(tmp_path) as scene:
        params = pb.SamplingParams(n=3, seed=5)
        answers = await scene.generate(request_id="r", sampling_params=params)
        ends = [a.complete for a in answers if a.HasField("complete")]

        assert sorted(end.index for end in ends) == [0, 1, 2]
        (link,) = scene.stack.workers.links
        assert sorted(request.sampling.seed for request in link.requests) == [5, 6, 7]


@pytest.mark.asyncio
async def test_an_abort_frees_the_row_and_ends_the_answer(tmp_path: Path) -> None:
    """Once: no lease is left when the router hears of the end; the id is free again."""
    async with scene_of(tmp_path) as scene:
        scene.stack.workers.script.endless = True
        call = scene.engine.Generate(ask(request_id="r", sampling_params=pb.SamplingParams(n=2)))
        answers = aiter(call)
        await anext(answers)
        for _ in range(2):
            await scene.engine.Abort(pb.AbortRequest(request_ids=["nobody", "r"]))
        ends = [a.complete async for a in answers if a.HasField("complete")]

        assert [(end.index, end.finish_reason) for end in ends] == [(0, "abort"), (1, "abort")]
        assert not scene.stack.model("a").leases
        scene.stack.workers.script.endless = False
        assert (await scene.generate(request_id="r"))[-1].complete.finish_reason == "length"


@pytest.mark.asyncio
async def test_a_router_that_leaves_gives_its_lease_back(tmp_path: Path) -> None:
    """A gentle unload waits for streams: that it completes shows that none is left."""
    async with scene_of(tmp_path) as scene:
        scene.stack.workers.script.endless = True
        call = scene.engine.Generate(ask())
        await anext(aiter(call))
        call.cancel()
        await scene.stack.runtime.unload("digest-a", grace_s=LONG_S, force=False)
        assert isinstance(scene.stack.model("a").phase, phases.Unloaded)


@pytest.mark.asyncio
async def test_a_stream_survives_its_worker(tmp_path: Path) -> None:
    """The router sees neither a gap nor a repeat."""
    async with scene_of(tmp_path) as scene:
        gone = RemoteError(grpc.StatusCode.UNAVAILABLE, "Socket closed")
        scene.stack.workers.script.refusals.append(Refusal(gone, code=-9, after=2))
        answers = await scene.generate()

        assert [i for a in answers for i in a.chunk.token_ids] == [0, 1, 2]
        assert answers[-1].complete.completion_tokens == 3
        assert len(scene.stack.workers.launcher.processes) == 2


REFUSALS: list[tuple[dict[str, Any], type[MlxdError]]] = [
    ({"sampling_params": pb.SamplingParams(structural_tag="{}")}, FieldNotServed),
    ({"kv_transfer_params_json": "{}"}, FieldNotServed),
    ({"data_parallel_rank": 1}, InvalidRequest),
    ({"sampling_params": pb.SamplingParams(temperature=-1.0)}, InvalidRequest),
    ({"sampling_params": pb.SamplingParams(n=17)}, InvalidRequest),
    ({"text": ""}, InvalidRequest),
]


@pytest.mark.asyncio
async def test_what_cannot_be_honoured_is_refused_before_a_model_is_loaded(tmp_path: Path) -> None:
    """By name or by the checks of the controller's own door."""
    async with scene_of(tmp_path) as scene:
        for fields, kind in REFUSALS:
            error = await error_of(scene.engine.Generate(ask(**fields)))
            assert isinstance(error, kind), fields
        assert not scene.stack.workers.launcher.processes


@pytest.mark.asyncio
async def test_a_request_that_is_too_large_is_refused(tmp_path: Path) -> None:
    """The bound is the controller's own; nothing of it is parsed."""
    async with scene_of(tmp_path) as scene:
        many = pb.TokenizedInput(input_ids=[1] * (config.TOKENIZE_IDS_MAX + 1))
        error = await error_of(scene.engine.Generate(ask(tokenized=many)))
        assert isinstance(error, InvalidRequest)
        assert str(config.TOKENIZE_IDS_MAX) in error.describe()


@pytest.mark.asyncio
async def test_an_id_in_flight_is_refused(tmp_path: Path) -> None:
    """As at the controller's own door, and the call under way is not touched."""
    async with scene_of(tmp_path) as scene:
        scene.stack.workers.script.endless = True
        running = aiter(scene.engine.Generate(ask(request_id="same")))
        await anext(running)
        error = await error_of(scene.engine.Generate(ask(request_id="same")))
        assert isinstance(error, DuplicateRequest)
        await scene.engine.Abort(pb.AbortRequest(request_ids=["same"]))
        assert [a.complete.finish_reason async for a in running if a.HasField("complete")]


@pytest.mark.asyncio
async def test_an_abort_has_room_where_streams_have_none(tmp_path: Path) -> None:
    """Calls that do no work pass while those that do are refused."""
    async with scene_of(tmp_path, calls_max=1) as scene:
        scene.stack.workers.script.endless = True
        running = aiter(scene.engine.Generate(ask(request_id="r")))
        await anext(running)
        assert isinstance(await error_of(scene.engine.Generate(ask())), QueueFull)
        assert (await scene.engine.HealthCheck(pb.HealthCheckRequest())).healthy
        await scene.engine.Abort(pb.AbortRequest(request_ids=["r"]))
        assert [a async for a in running][-1].complete.finish_reason == "abort"


@pytest.mark.asyncio
async def test_a_vector_is_that_of_the_ids(tmp_path: Path) -> None:
    """With the text beside them, or without: then it is spelt. The fake's ids are bytes."""
    async with scene_of(tmp_path) as scene:
        for text in ("once", ""):
            ids = pb.TokenizedInput(input_ids=list(b"once"), original_text=text)
            answer = await scene.engine.Embed(pb.EmbedRequest(request_id="e", tokenized=ids))
            assert list(answer.embedding) == [4.0, 1.0]
            assert (answer.embedding_dim, answer.prompt_tokens) == (2, 1)


@pytest.mark.asyncio
@pytest.mark.parametrize(("ids", "text"), [([], "once"), (list(b"twice"), "once")])
async def test_ids_that_are_not_the_text_s_are_refused(
    tmp_path: Path, ids: list[int], text: str
) -> None:
    """A vector of something else would be wrong in silence."""
    async with scene_of(tmp_path) as scene:
        asking = pb.EmbedRequest(tokenized=pb.TokenizedInput(input_ids=ids, original_text=text))
        error = await error_of(scene.engine.Embed(asking))
        assert isinstance(error, InvalidRequest)
        assert "tokenized.input_ids" in error.describe()


@pytest.mark.asyncio
async def test_a_model_whose_files_have_gone_is_not_healthy(tmp_path: Path) -> None:
    """While it is not loaded; the message says why."""
    async with scene_of(tmp_path) as scene:
        assert (await scene.engine.HealthCheck(pb.HealthCheckRequest())).healthy
        scene.store.put(Path("/models/a"), "digest-a", ModelNotFound("a", "gone"))
        answer = await scene.engine.HealthCheck(pb.HealthCheckRequest())
        assert not answer.healthy
        assert "gone" in answer.message


@pytest.mark.asyncio
async def test_the_server_says_what_is_under_way(tmp_path: Path) -> None:
    """How many requests, since when, and how many rows once they are known."""
    async with scene_of(tmp_path) as scene:
        before = await scene.engine.GetServerInfo(pb.GetServerInfoRequest())
        scene.stack.workers.script.endless = True
        call = scene.engine.Generate(ask())
        await anext(aiter(call))
        scene.stack.clock.now += 5
        during = await scene.engine.GetServerInfo(pb.GetServerInfoRequest())
        call.cancel()

        assert (before.active_requests, before.max_num_seqs) == (0, 0)
        assert before.last_receive_timestamp == 0
        assert (during.active_requests, during.max_num_seqs) == (1, config.ROWS_MAX_DEFAULT)
        assert during.uptime_seconds == before.uptime_seconds + 5
        assert during.last_receive_timestamp > 0
        assert during.data_parallel_size == 1


@pytest.mark.asyncio
async def test_a_request_that_waits_for_its_model_is_load(tmp_path: Path) -> None:
    """Before there is a worker, too; what is asked for besides the core is not there."""
    async with scene_of(tmp_path) as scene:
        scene.stack.workers.script.load_gate.clear()
        call = scene.engine.Generate(ask())
        await scene.stack.until("a", phases.Loading)
        (load,) = (await scene.engine.GetLoads(pb.GetLoadsRequest(include=["core"]))).loads
        none = await scene.engine.GetLoads(pb.GetLoadsRequest(include=["memory"]))
        error = await error_of(scene.engine.GetLoads(pb.GetLoadsRequest(dp_rank=1)))
        scene.stack.workers.script.load_gate.set()
        assert [a async for a in call]

        assert (load.num_running_reqs, load.num_waiting_reqs, load.num_total_reqs) == (0, 1, 1)
        assert not none.loads
        assert isinstance(error, InvalidRequest)


@pytest.mark.asyncio
async def test_load_is_pushed_to_who_takes_it(tmp_path: Path) -> None:
    """Numbered 0, as no event was sent; whoever wants events alone, or old ones, is told."""
    async with scene_of(tmp_path) as scene:
        asking = common_pb2.SubscribeKvEventsRequest(load_records_before_first_batch=True)
        call = scene.engine.SubscribeKvEvents(asking)
        batches = aiter(call)
        first, second = await anext(batches), await anext(batches)
        call.cancel()
        late = common_pb2.SubscribeKvEventsRequest(
            load_records_before_first_batch=True, start_sequence_number=7
        )
        out = await error_of(scene.engine.SubscribeKvEvents(late))
        old = common_pb2.SubscribeKvEventsRequest()
        unserved = await error_of(scene.engine.SubscribeKvEvents(old))

        assert (first.sequence_number, len(first.events)) == (0, 0)
        assert first.load.load_only
        assert [first.load.sample, second.load.sample] == [0, 1]
        assert isinstance(out, RemoteError)
        assert out.code is grpc.StatusCode.OUT_OF_RANGE
        assert isinstance(unserved, FieldNotServed)


@pytest.mark.asyncio
@pytest.mark.parametrize("method", ["FlushCache", "StartProfile", "StopProfile"])
async def test_a_method_that_is_not_served_is_named(tmp_path: Path, method: str) -> None:
    """UNIMPLEMENTED, in the words of a field that is not served."""
    async with scene_of(tmp_path) as scene:
        request = getattr(common_pb2, f"{method}Request")()
        error = await error_of(getattr(scene.engine, method)(request))
        assert isinstance(error, FieldNotServed)
        assert error.field == method


@pytest.mark.asyncio
async def test_facts_and_tokenizer_come_from_the_files(tmp_path: Path) -> None:
    """Of the folder where the model is."""
    store = FakeStore({})
    store.put(demo_model(), "digest", facts(10))
    await store.add(demo_model(), name="demo")
    async with (
        controller_stack(store=store) as stack,
        engines_of(stack, store, tmp_path) as (engine,),
    ):
        info = await engine.GetModelInfo(pb.GetModelInfoRequest())
        chunks = [c async for c in engine.GetTokenizer(common_pb2.GetTokenizerRequest())]

        assert (info.served_model_name, info.model_type) == ("demo", "llama")
        assert chunks[-1].sha256


@pytest.mark.asyncio
async def test_tokenizers_have_few_places(tmp_path: Path) -> None:
    """One more is told when to come back, and nothing is read for it; a place is given back."""
    store = FakeStore({})
    store.put(demo_model(), "digest", facts(10))
    await store.add(demo_model(), name="demo")
    async with controller_stack(store=store) as stack:
        room, context = Room("tokenizers being sent", 1), cast("Context", None)
        engine = Engine("demo", services_of(stack, store), tokenizers=room)
        sending = engine.GetTokenizer(common_pb2.GetTokenizerRequest(), context)
        await anext(sending)
        with pytest.raises(QueueFull, match="tokenizers being sent"):
            await anext(engine.GetTokenizer(common_pb2.GetTokenizerRequest(), context))
        await sending.aclose()
        assert room.taken == 0
