"""InferenceService over real gRPC with fake workers: relay, leases, errors, ends."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration

from mlxd.v1 import inference_pb2, model_pb2, types_pb2
from mlxd_controller.core import phases
from mlxd_models.sizes.sight_sizes import SightSizes
from mlxd_shared import config
from mlxd_shared.domain.errors import (
    DuplicateRequest,
    FieldNotServed,
    InvalidModel,
    InvalidRequest,
    ModelLoading,
    ModelNotFound,
    ModelTooLarge,
    ModelUnloaded,
    QueueFull,
    WorkerExited,
    WorkerLost,
)
from tests.fakes.store import FakeStore
from tests.support.calls import error_of, said_in_time
from tests.support.controller_stack import controller_stack, request, store_of
from tests.support.model_facts import device, facts, need_mib

LONG_S = 600.0


@pytest.mark.asyncio
async def test_a_cold_model_is_loaded_and_its_stream_relayed_to_the_end() -> None:
    """One load, every message in order, the last with finish and usage."""
    async with controller_stack() as stack:
        messages = await stack.generate(request_id="r-1")

        assert [i for m in messages for i in m.token_ids] == [0, 1, 2]
        assert messages[-1].finish.reason == types_pb2.FINISH_REASON_LENGTH
        (link,) = stack.workers.links
        assert link.requests[0].request_id == "r-1"
        assert link.requests[0].HasField("load_duration")
        assert link.specs[0].context_length == 1024


@pytest.mark.asyncio
async def test_concurrent_first_requests_cause_one_load() -> None:
    """However many arrive together, one process is launched and all are served."""
    async with controller_stack() as stack:
        outcomes = await asyncio.gather(*(stack.generate() for _ in range(20)))

        assert all(len(messages) == 4 for messages in outcomes)
        assert len(stack.workers.launcher.processes) == 1


@pytest.mark.asyncio
async def test_an_empty_model_name_is_good_where_there_is_one_model() -> None:
    """One model: it is meant. Two: the request must name one."""
    async with controller_stack() as stack:
        assert len(await stack.generate("")) == 4
    async with controller_stack(store=store_of({"a": 1, "b": 1})) as stack:
        error = await error_of(stack.inference.Generate(request("")))
        assert isinstance(error, InvalidRequest)
        assert error.violations[0].field == "model"


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("bad", "field"),
    [
        (request(worker_incarnation="x"), "worker_incarnation"),
        (request(load_duration=Duration(seconds=1)), "load_duration"),
        (request(max_tokens=0), "max_tokens"),
    ],
)
async def test_what_a_client_may_not_say_is_refused_by_name(
    bad: inference_pb2.GenerateRequest, field: str
) -> None:
    """Fields of the controller and values out of range: before any model is loaded."""
    async with controller_stack() as stack:
        error = await error_of(stack.inference.Generate(bad))
        assert isinstance(error, InvalidRequest)
        assert [violation.field for violation in error.violations] == [field]
        assert not stack.workers.launcher.processes


@pytest.mark.asyncio
async def test_images_are_for_models_that_see() -> None:
    """Others refuse them before they are loaded, naming image and model; GetModel says who sees."""
    sight = SightSizes(token_id=5, tokens=4, side=2, hidden=16, pass_values=1)
    seeing = replace(facts(1), sight=sight)
    bare = replace(facts(1), unseeing="a file is missing")
    store = FakeStore({"blind": ("b", facts(1)), "bare": ("t", bare), "sees": ("s", seeing)})
    part = inference_pb2.ContentPart
    parts = [part(text="what is it?"), part(image=b"x"), part(image=b"y")]
    messages = [
        inference_pb2.ChatMessage(role="user", content="look"),
        inference_pb2.ChatMessage(role="user", parts=parts),
    ]
    chat = inference_pb2.ChatPrompt(messages=messages)
    async with controller_stack(store=store) as stack:
        error = await error_of(stack.inference.Generate(request("blind", chat=chat)))
        assert isinstance(error, FieldNotServed)
        assert error.field == "chat.messages[1].parts[1].image"
        assert error.why == "blind does not see images"
        error = await error_of(stack.inference.Generate(request("bare", chat=chat)))
        assert isinstance(error, FieldNotServed)
        assert error.why == "bare does not see images: a file is missing"
        assert not stack.workers.launcher.processes
        assert len(await stack.generate("sees", chat=chat)) == 4
        for name, sees in (("blind", False), ("sees", True)):
            known = await stack.models.GetModel(model_pb2.GetModelRequest(model=name))
            assert known.model.has_vision is sees


@pytest.mark.asyncio
async def test_texts_become_vectors_by_the_models_worker() -> None:
    """The answer is the worker's; what makes no sense is refused before a load."""
    async with controller_stack() as stack:
        embed = inference_pb2.EmbedRequest
        error = await error_of(stack.inference.Embed(embed(model="a", dimensions=0)))
        assert isinstance(error, InvalidRequest)
        assert [v.field for v in error.violations] == ["texts", "dimensions"]
        assert not stack.workers.launcher.processes
        answer = await stack.inference.Embed(embed(model="a", texts=["abc"]))
        assert list(answer.embeddings[0].values) == [3, 1]


@pytest.mark.asyncio
async def test_an_unknown_model_is_not_found() -> None:
    """NOT_FOUND with the name."""
    async with controller_stack() as stack:
        error = await error_of(stack.inference.Generate(request("nobody")))
        assert isinstance(error, ModelNotFound)
        assert error.model == "nobody"


@pytest.mark.asyncio
async def test_a_model_that_can_never_fit_is_refused_with_its_figures() -> None:
    """ModelTooLarge over the wire: need and budget are fields."""
    async with controller_stack(memory=device(50)) as stack:
        error = await error_of(stack.inference.Generate(request()))
        assert isinstance(error, ModelTooLarge)
        assert error.need_bytes > error.budget_bytes


@pytest.mark.asyncio
async def test_a_request_id_in_flight_is_refused_and_free_afterwards() -> None:
    """Idempotency: a second request with the id of a running one is a duplicate."""
    async with controller_stack() as stack:
        stack.workers.script.endless = True
        running = stack.inference.Generate(request(request_id="same"))
        await anext(aiter(running))
        error = await error_of(stack.inference.Generate(request(request_id="same")))
        assert isinstance(error, DuplicateRequest)
        running.cancel()
        await stack.runtime.unload("digest-a", grace_s=LONG_S, force=False)
        stack.workers.script.endless = False
        assert await stack.generate(request_id="same")


@pytest.mark.asyncio
async def test_a_client_that_goes_away_gives_its_lease_back() -> None:
    """A gentle unload waits for streams: that it completes shows that none is left."""
    async with controller_stack() as stack:
        stack.workers.script.endless = True
        calls = [stack.inference.Generate(request()) for _ in range(3)]
        for call in calls:
            await anext(aiter(call))
        assert len(stack.model("a").leases) == 3
        for call in calls:
            call.cancel()
        await stack.runtime.unload("digest-a", grace_s=LONG_S, force=False)
        assert isinstance(stack.model("a").phase, phases.Unloaded)


@pytest.mark.asyncio
async def test_a_client_that_stops_reading_and_leaves_gives_its_lease_back() -> None:
    """A stream that is blocked by its reader ends with its client all the same."""
    async with controller_stack() as stack:
        stack.workers.script.tokens = 200_000
        call = stack.inference.Generate(request())
        await anext(aiter(call))
        for _ in range(2000):  # until the relay is blocked on its reader
            await asyncio.sleep(0)
        call.cancel()
        await stack.runtime.unload("digest-a", grace_s=LONG_S, force=False)
        assert isinstance(stack.model("a").phase, phases.Unloaded)


@pytest.mark.asyncio
async def test_a_client_that_leaves_while_its_model_loads_leaves_the_load() -> None:
    """The load goes on without it and the model is ready for the next."""
    async with controller_stack() as stack:
        stack.workers.script.load_gate.clear()
        call = stack.inference.Generate(request())
        await stack.until("a", phases.Loading)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await anext(aiter(call))
        stack.workers.script.load_gate.set()
        await stack.until("a", phases.Ready)
        assert len(await stack.generate()) == 4
        assert len(stack.workers.launcher.processes) == 1


@pytest.mark.asyncio
async def test_a_deadline_that_comes_before_the_model_says_so() -> None:
    """ModelLoading with the progress, a moment before the deadline; the load goes on."""
    async with controller_stack() as stack:
        stack.workers.script.load_gate.clear()
        error = await said_in_time(
            lambda: error_of(stack.inference.Generate(request(), timeout=0.5))
        )
        assert isinstance(error, ModelLoading)
        assert error.retry_after_s > 0
        stack.workers.script.load_gate.set()
        await stack.until("a", phases.Ready)


@pytest.mark.asyncio
async def test_a_ready_model_is_never_said_to_load() -> None:
    """However near the deadline is, what is there is given, not refused as still loading."""
    store = store_of({"a": 10})
    async with controller_stack(store=store) as stack:
        await stack.generate()
        ref = await store.resolve("a")
        async with stack.runtime.lease(ref, keep_alive_s=None, timeout_s=0.0) as lease:
            assert isinstance(lease.model.phase, phases.Ready)


@pytest.mark.asyncio
async def test_a_failed_load_is_told_to_every_waiter_and_the_next_request_tries_again() -> None:
    """The worker's own reason, as it is; afterwards the model can be served."""
    async with controller_stack() as stack:
        stack.workers.script.load_error = InvalidModel("a tensor too many", "x.safetensors", "w")
        stack.workers.script.load_gate.clear()
        calls = [stack.inference.Generate(request()) for _ in range(2)]
        waiting = [asyncio.create_task(error_of(call)) for call in calls]
        await stack.until("a", phases.Loading)
        stack.workers.script.load_gate.set()
        for error in await asyncio.gather(*waiting):
            assert isinstance(error, InvalidModel)
            assert (error.file, error.field) == ("x.safetensors", "w")
        stack.workers.script.load_error = None
        assert len(await stack.generate()) == 4


@pytest.mark.asyncio
async def test_a_worker_that_does_not_start_is_told_with_its_code() -> None:
    """WorkerExited over the wire; its last lines stay in the log and the status."""
    async with controller_stack() as stack:
        stack.workers.launcher.failure = WorkerExited("a", ("secret path",), 7)
        error = await error_of(stack.inference.Generate(request()))
        assert isinstance(error, WorkerExited)
        assert (error.code, error.last_lines) == (7, ())


@pytest.mark.asyncio
async def test_a_worker_that_dies_in_a_stream_is_lost_and_replaced() -> None:
    """With migrate=false it is WORKER_LOST: after how many tokens, and why. The next is served."""
    async with controller_stack() as stack:
        stack.workers.script.endless = True
        call = stack.inference.Generate(request(migrate=False))
        messages = aiter(call)
        for _ in range(3):
            await anext(messages)
        stack.workers.launcher.processes[0].end(-9)
        error = await error_of(call)
        assert isinstance(error, WorkerLost)
        assert (error.offset, error.cause) == (3, "signal 9")
        await stack.until("a", phases.Failed)
        stack.workers.script.endless = False
        assert len(await stack.generate()) == 4
        assert len(stack.workers.launcher.processes) == 2


@pytest.mark.asyncio
async def test_a_forced_unload_ends_streams_with_aborted() -> None:
    """The client hears that an operator did it."""
    async with controller_stack() as stack:
        stack.workers.script.endless = True
        call = stack.inference.Generate(request())
        messages = aiter(call)
        for _ in range(3):
            await anext(messages)
        assert await stack.runtime.unload("digest-a", grace_s=0, force=True) == 1
        error = await error_of(call)
        assert isinstance(error, ModelUnloaded)
        assert await call.code() is grpc.StatusCode.ABORTED


@pytest.mark.asyncio
async def test_keep_alive_zero_unloads_after_the_stream() -> None:
    """The process is gone once the model is idle."""
    async with controller_stack() as stack:
        await stack.generate(keep_alive=Duration(seconds=0))
        await stack.until("a", phases.Unloaded)
        assert stack.workers.living == 0


@pytest.mark.asyncio
async def test_an_idle_model_expires_when_its_time_has_come() -> None:
    """Five minutes of the clock, not of the test."""
    async with controller_stack() as stack:
        await stack.generate()
        await stack.settle()
        stack.pass_time(299)
        await stack.settle()
        assert isinstance(stack.model("a").phase, phases.Ready)
        stack.pass_time(2)
        await stack.until("a", phases.Unloaded)


@pytest.mark.asyncio
async def test_one_model_makes_room_for_another() -> None:
    """The idle one is unloaded, its process gone before the other is launched."""
    memory = device(need_mib(10) + need_mib(10) // 2)
    async with controller_stack(store=store_of({"a": 10, "b": 10}), memory=memory) as stack:
        await stack.generate("a")
        await stack.generate("b")
        assert isinstance(stack.model("a").phase, phases.Unloaded)
        assert stack.workers.living == 1


@pytest.mark.asyncio
async def test_a_busy_model_is_not_evicted() -> None:
    """A bounded wait, then RESOURCE_EXHAUSTED with a time to come back; the stream goes on."""
    memory = device(need_mib(10) + need_mib(10) // 2)
    async with controller_stack(store=store_of({"a": 10, "b": 10}), memory=memory) as stack:
        stack.workers.script.endless = True
        running = stack.inference.Generate(request("a"))
        await anext(aiter(running))
        refused: Any = stack.inference.Generate(request("b"))
        waiting = asyncio.create_task(error_of(refused))
        await stack.until("b", phases.Queued)
        stack.pass_time(config.ROOM_WAIT_MAX_S)
        error = await waiting
        assert await refused.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert not isinstance(error, QueueFull)
        assert isinstance(stack.model("a").phase, phases.Ready)


@pytest.mark.asyncio
async def test_tokenize_and_detokenize_reach_the_worker() -> None:
    """They load the model as Generate does, and refuse what is the controller's to say."""
    async with controller_stack() as stack:
        tokens = await stack.inference.Tokenize(inference_pb2.TokenizeRequest(model="a", text="hi"))
        back = await stack.inference.Detokenize(
            inference_pb2.DetokenizeRequest(model="a", token_ids=tokens.token_ids)
        )
        assert back.text == "hi"
        error = await error_of(
            stack.inference.Tokenize(
                inference_pb2.TokenizeRequest(model="a", text="hi", worker_incarnation="x")
            )
        )
        assert isinstance(error, InvalidRequest)
        assert not stack.model("a").leases
