"""ModelService over real gRPC with fake workers: lists, loads, unloads, watches."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration
from grpc_health.v1 import health_pb2

from mlxd.v1 import model_pb2, types_pb2
from mlxd_controller.core import phases
from mlxd_controller.runtime.ports import ModelRef
from mlxd_shared.domain.errors import (
    FieldNotServed,
    InvalidModel,
    InvalidRequest,
    ModelNotFound,
    ModelTooLarge,
    ModelUnloaded,
    WorkerTimedOut,
)
from mlxd_shared.domain.requests import KVFormat
from tests.fakes.store import FakeStore
from tests.fakes.world import UNIX_OFFSET_S
from tests.support.calls import error_of, health
from tests.support.controller_stack import Stack, controller_stack, request, store_of
from tests.support.model_facts import device, facts, need_mib

READY = types_pb2.MODEL_STATE_READY
UNLOADED = types_pb2.MODEL_STATE_UNLOADED
FAILED = types_pb2.MODEL_STATE_FAILED
TWO_OF_TEN = device(2 * need_mib(10))


async def load(stack: Stack, model: str = "a", **fields: Any) -> list[model_pb2.LoadModelResponse]:
    """Load to the end and return every message."""
    call = stack.models.LoadModel(model_pb2.LoadModelRequest(model=model, **fields))
    return [message async for message in call]


async def get(stack: Stack, model: str = "a") -> types_pb2.Model:
    """Return one model."""
    return (await stack.models.GetModel(model_pb2.GetModelRequest(model=model))).model


# --- lists ---------------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_pages_hold_every_model_once_by_name() -> None:
    """Page sizes cut the list; the token leads on; the last page has none."""
    sizes = {f"m{i:02}": 1 for i in range(7)}
    async with controller_stack(store=store_of(sizes)) as stack:
        names: list[str] = []
        token = ""
        for _ in range(3):
            page = await stack.models.ListModels(
                model_pb2.ListModelsRequest(page_size=3, page_token=token)
            )
            names += [model.name for model in page.models]
            token = page.next_page_token
        assert names == sorted(sizes)
        assert token == ""


@pytest.mark.asyncio
@pytest.mark.parametrize("size", [-1, 1001])
async def test_a_page_size_out_of_range_is_refused(size: int) -> None:
    """0 to 1000."""
    async with controller_stack() as stack:
        call = stack.models.ListModels(model_pb2.ListModelsRequest(page_size=size))
        error = await error_of(call)
        assert isinstance(error, InvalidRequest)
        assert error.violations[0].field == "page_size"


@pytest.mark.asyncio
async def test_a_broken_folder_is_listed_with_its_error_and_hides_none() -> None:
    """FAILED with the file's name; the others are as they are; two names are one model."""
    broken = InvalidModel("missing", file="config.json")
    store = FakeStore(
        {"x": ("", broken), "a": ("d", facts(1)), "b": ("d", facts(1)), "c": ("c", facts(1))}
    )
    async with controller_stack(store=store) as stack:
        page = await stack.models.ListModels(model_pb2.ListModelsRequest())
        assert [(m.name, m.state) for m in page.models] == [
            ("a", UNLOADED), ("c", UNLOADED), ("x", FAILED),
        ]  # fmt: skip
        assert list(page.models[0].aliases) == ["b"]
        assert page.models[2].error == "config.json: missing"


class OnMachines(FakeStore):
    """A store whose models are on machines of their own, by their digests."""

    def _ref(self, path: Path) -> ModelRef:
        return replace(ref := super()._ref(path), machine=ref.digest)


@pytest.mark.asyncio
async def test_a_model_tells_on_whose_disk_it_is() -> None:
    """Its path says nothing of a machine."""
    store = OnMachines({"a": ("n1", facts(1)), "b": ("", facts(1))})
    async with controller_stack(store=store) as stack:
        page = await stack.models.ListModels(model_pb2.ListModelsRequest())
        places = [(m.machine, m.path) for m in page.models]
        assert places == [("n1", "/models/a"), ("", "/models/b")]


@pytest.mark.asyncio
async def test_a_model_tells_what_is_in_force() -> None:
    """Unloaded: facts and defaults. Ready: plan, worker, times, keep-alive, pin."""
    async with controller_stack() as stack:
        cold = await get(stack)
        assert (cold.state, cold.context_length, cold.context_length_max) == (UNLOADED, 0, 1024)
        assert cold.effective_sampling.temperature == pytest.approx(0.8)
        assert not cold.HasField("expire_time")

        options = types_pb2.LoadOptions(
            context_length=256, rows_max=2, pinned=True, keep_alive=Duration(seconds=60),
            sampling=types_pb2.SamplingOptions(temperature=0.25),
        )  # fmt: skip
        await load(stack, options=options)
        warm = await get(stack)
        assert (warm.state, warm.context_length, warm.rows_max) == (READY, 256, 2)
        assert warm.pinned
        assert warm.weights == types_pb2.WEIGHTS_FORMAT_FLOAT32
        assert warm.effective_sampling.temperature == 0.25
        assert warm.worker_incarnation
        assert warm.resident_bytes == 1000
        now = stack.clock.now + UNIX_OFFSET_S
        assert warm.expire_time.ToNanoseconds() / 1e9 == pytest.approx(now + 60)


@pytest.mark.asyncio
async def test_a_worker_is_told_the_prefix_cache_that_was_planned() -> None:
    """Left open it is the plan's share, in the report, the order and the loaded model alike."""
    memory = device(1000, prefix_fraction=0.125)
    async with controller_stack(memory=memory) as stack:
        (first, *_) = await load(stack)
        (link,) = stack.workers.links
        spec, model = link.specs[0], await get(stack)

    assert first.fit.prefix_cache_bytes == memory.budget_bytes // 8
    assert spec.prefix_cache_nbytes == model.prefix_cache_bytes == first.fit.prefix_cache_bytes
    assert spec.kv_format is KVFormat.MODEL
    assert first.fit.kv_format == model.kv_format == types_pb2.KV_FORMAT_MODEL


# --- loading -------------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_a_load_tells_its_progress_and_ends_ready() -> None:
    """The first message has the fit report, the last says READY."""
    async with controller_stack() as stack:
        messages = await load(stack)
        assert messages[0].HasField("fit")
        assert not any(message.HasField("fit") for message in messages[1:])
        assert messages[-1].model.state == READY
        again = await load(stack)
        assert [message.model.state for message in again] == [READY]
        assert again[0].fit.fits_now


@pytest.mark.asyncio
async def test_a_load_with_keep_alive_zero_is_ready_and_then_goes() -> None:
    """The client hears READY; the model is unloaded as soon as it is idle."""
    async with controller_stack() as stack:
        options = types_pb2.LoadOptions(keep_alive=Duration(seconds=0))
        messages = await load(stack, options=options)
        assert messages[-1].model.state == READY
        await stack.until("a", phases.Unloaded)


@pytest.mark.asyncio
async def test_a_client_that_leaves_its_load_leaves_it_running() -> None:
    """The load is the controller's job: it completes without anybody waiting."""
    async with controller_stack() as stack:
        stack.workers.script.load_gate.clear()
        call = stack.models.LoadModel(model_pb2.LoadModelRequest(model="a"))
        await anext(aiter(call))
        call.cancel()
        await stack.settle()
        stack.workers.script.load_gate.set()
        await stack.until("a", phases.Ready)


@pytest.mark.asyncio
async def test_a_load_that_makes_no_progress_is_given_up() -> None:
    """WorkerTimedOut, the process is ended, and the model says why it failed."""
    async with controller_stack(stall_timeout_s=0.2) as stack:
        stack.workers.script.load_gate.clear()
        call = stack.models.LoadModel(model_pb2.LoadModelRequest(model="a"))
        error = await error_of(call)
        assert isinstance(error, WorkerTimedOut)
        assert stack.workers.living == 0
        model = await get(stack)
        assert model.state == FAILED
        assert "no progress" in model.error


@pytest.mark.asyncio
async def test_only_reckoning_changes_nothing() -> None:
    """validate_only: every term, who would go, what would help; nothing is loaded or taken in."""
    store = store_of({"a": 10, "b": 10, "c": 10, "huge": 5000})
    async with controller_stack(store=store, memory=TWO_OF_TEN) as stack:
        (free,) = await load(stack, "a", validate_only=True)
        assert free.fit.fits_now
        assert [term.name for term in free.fit.terms] == [
            "weights", "kv", "prefix", "activations", "pool", "process",
        ]  # fmt: skip
        assert sum(term.bytes for term in free.fit.terms) == free.fit.need_bytes
        await load(stack, "a")
        stack.clock.now += 1
        await load(stack, "b")
        (full,) = await load(stack, "c", validate_only=True)
        assert (full.fit.fits_now, full.fit.fits_ever) == (False, True)
        assert list(full.fit.would_evict) == ["a"]
        (never,) = await load(stack, "huge", validate_only=True)
        assert not never.fit.fits_ever
        assert never.fit.suggestions
        assert len(stack.workers.launcher.processes) == 2


@pytest.mark.asyncio
async def test_a_path_is_taken_in_by_a_load_and_not_by_reckoning() -> None:
    """A folder is one argument away; a name goes with a path only; a relative one is refused."""
    store = store_of({"a": 10})
    folder = next(iter(store._folders)).with_name("new")
    store.put(folder, "digest-new", facts(5))
    async with controller_stack(store=store) as stack:
        (seen,) = await load(stack, str(folder), name="mine", validate_only=True)
        assert seen.model.name == "mine"
        missing = stack.models.GetModel(model_pb2.GetModelRequest(model="mine"))
        assert isinstance(await error_of(missing), ModelNotFound)
        messages = await load(stack, str(folder), name="mine")
        assert (messages[-1].model.name, messages[-1].model.state) == ("mine", READY)
        assert (await get(stack, "mine")).state == READY
        named = stack.models.LoadModel(model_pb2.LoadModelRequest(model="a", name="x"))
        assert isinstance(await error_of(named), InvalidRequest)
        relative = stack.models.LoadModel(model_pb2.LoadModelRequest(model="some/where/else"))
        error = await error_of(relative)
        assert isinstance(error, ModelNotFound)
        assert "absolute" in error.hint


@pytest.mark.asyncio
async def test_bad_loads_are_refused_by_name() -> None:
    """Over the model's context, heads or weights that do not pack, no token, a later field."""
    async with controller_stack() as stack:
        cases = (
            (types_pb2.LoadOptions(context_length=2048), "options.context_length", "1024"),
            (types_pb2.LoadOptions(kv_format=types_pb2.KV_FORMAT_Q4), "options.kv_format", "64 or"),
            (types_pb2.LoadOptions(weights=types_pb2.WEIGHTS_FORMAT_Q8), "options.weights", "q8"),
            (
                types_pb2.LoadOptions(sampling=types_pb2.SamplingOptions(logit_bias={64: 1.0})),
                "options.sampling.logit_bias[64]",
                "64 tokens",
            ),
        )
        for options, field, limit in cases:
            call = stack.models.LoadModel(model_pb2.LoadModelRequest(model="a", options=options))
            error = await error_of(call)
            assert isinstance(error, InvalidRequest)
            assert error.violations[0].field == field
            assert limit in error.violations[0].description
        later = model_pb2.LoadModelRequest(model="a", cancel_on_disconnect=True)
        assert isinstance(await error_of(stack.models.LoadModel(later)), FieldNotServed)
        assert not stack.workers.launcher.processes


@pytest.mark.asyncio
async def test_a_load_that_can_never_fit_is_refused() -> None:
    """FAILED_PRECONDITION with the figures; nothing was said before it."""
    async with controller_stack(memory=device(20)) as stack:
        call = stack.models.LoadModel(model_pb2.LoadModelRequest(model="a"))
        assert isinstance(await error_of(call), ModelTooLarge)


# --- unloading -----------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_unloading_is_idempotent_and_leaves_no_process() -> None:
    """Loaded or not: OK; when it answers, the process is gone."""
    async with controller_stack() as stack:
        await load(stack)
        for _ in range(2):
            answer = await stack.models.UnloadModel(model_pb2.UnloadModelRequest(model="a"))
            assert (answer.model.state, answer.streams_aborted) == (UNLOADED, 0)
            assert stack.workers.living == 0


@pytest.mark.asyncio
async def test_an_unload_that_names_no_model_unloads_none() -> None:
    """Not even the only one there is, which a request without a name would mean."""
    async with controller_stack() as stack:
        await load(stack, model="")
        unload = model_pb2.UnloadModelRequest(force=True)
        error = await error_of(stack.models.UnloadModel(unload))
        assert isinstance(error, InvalidRequest)  # as which INVALID_ARGUMENT travels
        assert [violation.field for violation in error.violations] == ["model"]
        assert isinstance(stack.model("a").phase, phases.Ready)


@pytest.mark.asyncio
async def test_an_unload_while_loading_ends_the_load() -> None:
    """Who waited hears MODEL_UNLOADED; the process is ended."""
    async with controller_stack() as stack:
        stack.workers.script.load_gate.clear()
        call = stack.models.LoadModel(model_pb2.LoadModelRequest(model="a"))
        await anext(aiter(call))
        await stack.models.UnloadModel(model_pb2.UnloadModelRequest(model="a"))
        assert isinstance(await error_of(call), ModelUnloaded)
        assert stack.workers.living == 0


@pytest.mark.asyncio
async def test_an_unload_while_launching_gives_the_launch_up() -> None:
    """The launcher is told that its caller gave up."""
    async with controller_stack() as stack:
        stack.workers.launcher.gate.clear()
        call = stack.models.LoadModel(model_pb2.LoadModelRequest(model="a"))
        await stack.until("a", phases.Loading)
        await stack.models.UnloadModel(model_pb2.UnloadModelRequest(model="a"))
        assert isinstance(await error_of(call), ModelUnloaded)
        assert stack.workers.launcher.given_up == 1


@pytest.mark.asyncio
@pytest.mark.parametrize("grace_s", [-1, 3601])
async def test_a_grace_out_of_range_is_refused(grace_s: int) -> None:
    """0 to an hour: a grace for ever would hold the model for ever."""
    async with controller_stack() as stack:
        unload = model_pb2.UnloadModelRequest(model="a", grace=Duration(seconds=grace_s))
        error = await error_of(stack.models.UnloadModel(unload))
        assert isinstance(error, InvalidRequest)
        assert error.violations[0].field == "grace"


@pytest.mark.asyncio
async def test_a_resident_model_keeps_its_name_whatever_happens_to_its_files() -> None:
    """Broken files cannot stop an unload, nor a stream from the model that is in memory."""
    store = store_of({"a": 10})
    async with controller_stack(store=store) as stack:
        await load(stack)
        path = next(iter(store._folders))
        store.put(path, "", InvalidModel("missing", file="config.json"))
        assert len(await stack.generate("a")) == 4
        answer = await stack.models.UnloadModel(model_pb2.UnloadModelRequest(model="a"))
        assert answer.model.state == UNLOADED
        call = stack.inference.Generate(request("a"))
        assert isinstance(await error_of(call), InvalidModel)


# --- watching ------------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_a_watch_tells_every_model_once_and_then_each_state() -> None:
    """All phases of a load and an unload, in order, none left out."""
    async with controller_stack(store=store_of({"a": 10, "b": 10})) as stack:
        call = stack.models.WatchModels(model_pb2.WatchModelsRequest())
        messages = aiter(call)
        first = [(await anext(messages)).model for _ in range(2)]
        assert [(m.name, m.state) for m in first] == [("a", UNLOADED), ("b", UNLOADED)]
        await load(stack, "a")
        await stack.models.UnloadModel(model_pb2.UnloadModelRequest(model="a"))
        states: list[int] = []
        while not states or states[-1] != UNLOADED:
            state = (await anext(messages)).model.state
            if state not in states:
                states.append(state)
        assert states == [
            types_pb2.MODEL_STATE_LOADING, READY, types_pb2.MODEL_STATE_UNLOADING, UNLOADED,
        ]  # fmt: skip
        call.cancel()


@pytest.mark.asyncio
async def test_health_of_a_model_follows_its_state() -> None:
    """models/<name> serves from READY until it is on its way out."""
    serving, not_serving = (
        health_pb2.HealthCheckResponse.SERVING,
        health_pb2.HealthCheckResponse.NOT_SERVING,
    )
    async with controller_stack() as stack:
        with stack.runtime.changes.subscribe() as news:
            await load(stack)
            while not isinstance((await news.next()).phase, phases.Ready):
                pass
        await asyncio.sleep(0)
        assert await health(stack.channel, "models/a") == serving
        await stack.models.UnloadModel(model_pb2.UnloadModelRequest(model="a"))
        assert await health(stack.channel, "models/a") == not_serving
