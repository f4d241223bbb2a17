"""Probes of ModelService and StatusService, through the controller."""

from __future__ import annotations

import asyncio

from google.protobuf.duration_pb2 import Duration

from mlxd.v1 import inference_pb2, model_pb2, status_pb2, types_pb2
from mlxd_shared.domain.errors import InvalidRequest, ModelNotFound
from tests.support.cli import LIMIT_S
from tests.system.wire.probe import LONG, Probes, Wire, read, refusal

PROBES = Probes()
ON_HUB = "o/pulled"
"""What the hub of the servers has that are probed."""
covering = PROBES.covering


async def load(
    wire: Wire, request: model_pb2.LoadModelRequest
) -> list[model_pb2.LoadModelResponse]:
    """Return every message of a load."""
    return [wire.recorder.see(message) async for message in wire.models.LoadModel(request)]


async def unload(wire: Wire, model: str) -> model_pb2.UnloadModelResponse:
    """Unload with the shortest grace."""
    request = model_pb2.UnloadModelRequest(model=model, grace=Duration(seconds=5))
    return wire.recorder.see(await wire.models.UnloadModel(request))


async def get(wire: Wire, model: str) -> types_pb2.Model:
    """Return the model as the controller shows it."""
    request = model_pb2.GetModelRequest(model=model)
    return wire.recorder.see(await wire.models.GetModel(request)).model


@covering("LoadModelRequest.model", "LoadModelRequest.name", "GetModelRequest.model")
async def a_folder_is_loaded_under_a_name(wire: Wire) -> None:
    """A path is served under the name given, and gone again after an unload."""
    request = model_pb2.LoadModelRequest(model=str(wire.folder), name="second")
    messages = await load(wire, request)
    assert messages[-1].model.state == types_pb2.MODEL_STATE_READY
    assert (await get(wire, "second")).path == str(wire.folder)
    assert isinstance(
        await refusal(wire.models.GetModel(model_pb2.GetModelRequest(model="nobody"))),
        ModelNotFound,
    )


@covering("ListModelsRequest.page_size", "ListModelsRequest.page_token")
async def pages(wire: Wire) -> None:
    """Pages of one cover the same models as one page."""
    whole = wire.recorder.see(await wire.models.ListModels(model_pb2.ListModelsRequest()))
    names, token = [], ""
    while True:
        request = model_pb2.ListModelsRequest(page_size=1, page_token=token)
        page = wire.recorder.see(await wire.models.ListModels(request))
        assert len(page.models) == 1
        names.append(page.models[0].name)
        token = page.next_page_token
        if not token:
            break
    assert names == [model.name for model in whole.models]


@covering(
    "LoadModelRequest.options",
    "LoadOptions.context_length",
    "LoadOptions.rows_max",
    "LoadOptions.weights",
    "LoadOptions.sampling",
    "LoadOptions.keep_alive",
    "LoadOptions.pinned",
    "LoadOptions.priority",
    "LoadOptions.kv_format",
    "LoadOptions.prefix_cache_bytes",
)
async def load_options_take_effect(wire: Wire) -> None:
    """Each option shows in the loaded model, and the sampling default changes the output."""
    await unload(wire, wire.model)
    options = types_pb2.LoadOptions(
        context_length=64,
        rows_max=2,
        weights=types_pb2.WEIGHTS_FORMAT_BFLOAT16,
        sampling=types_pb2.SamplingOptions(temperature=0, seed=5, logit_bias={7: 0.5}),
        keep_alive=Duration(seconds=1000),
        pinned=True,
        priority=3,
        kv_format=types_pb2.KV_FORMAT_Q8,
        prefix_cache_bytes=5 << 20,
    )
    await load(wire, model_pb2.LoadModelRequest(model=wire.model, options=options))
    model = await get(wire, wire.model)
    assert (model.context_length, model.rows_max, model.pinned) == (64, 2, True)
    assert model.priority == 3
    assert model.weights == types_pb2.WEIGHTS_FORMAT_BFLOAT16
    assert (model.kv_format, model.prefix_cache_bytes) == (types_pb2.KV_FORMAT_Q8, 5 << 20)
    assert model.effective_sampling.temperature == 0
    assert model.effective_sampling.seed == 5
    assert dict(model.effective_sampling.logit_bias) == {7: 0.5}
    assert 900 < model.expire_time.seconds - model.last_used_time.seconds <= 1000
    unseeded = types_pb2.SamplingOptions(top_k=50)
    assert await wire.ids(sampling=unseeded) == await wire.ids(sampling=unseeded)
    await unload(wire, wire.model)
    await load(wire, model_pb2.LoadModelRequest(model=wire.model))


@covering("LoadModelRequest.require_full")
async def a_whole_model_is_placed(wire: Wire) -> None:
    """On one device, whether that is required or a part would do."""
    await unload(wire, wire.model)
    for required in (True, False):
        request = model_pb2.LoadModelRequest(model=wire.model, require_full=required)
        (*_, last) = await load(wire, request)
        assert last.model.state == types_pb2.MODEL_STATE_READY
        assert last.model.device


@covering("LoadModelRequest.validate_only")
async def validate_only_reckons(wire: Wire) -> None:
    """The report sums its terms, and nothing is loaded."""
    await unload(wire, wire.model)
    request = model_pb2.LoadModelRequest(model=wire.model, validate_only=True)
    (only,) = await load(wire, request)
    assert sum(term.bytes for term in only.fit.terms) == only.fit.need_bytes > 0
    assert only.fit.fits_now
    assert (await get(wire, wire.model)).state == types_pb2.MODEL_STATE_UNLOADED
    huge = types_pb2.LoadOptions(rows_max=256, context_length=only.fit.context_length)
    request.options.CopyFrom(huge)
    (bigger,) = await load(wire, request)
    assert bigger.fit.need_bytes > only.fit.need_bytes
    request.options.CopyFrom(
        types_pb2.LoadOptions(kv_format=types_pb2.KV_FORMAT_Q4, prefix_cache_bytes=0)
    )
    (packed,) = await load(wire, request)
    before, after = _terms(only.fit), _terms(packed.fit)
    assert after["kv"] < before["kv"] / 4
    assert (after["prefix"], packed.fit.prefix_cache_bytes) == (0, 0)
    assert before["prefix"] == only.fit.prefix_cache_bytes > 0
    assert packed.fit.kv_format == types_pb2.KV_FORMAT_Q4


@covering("LoadOptions.ranks")
async def ranks_are_reckoned_with(wire: Wire) -> None:
    """Two take the CPU twice, each with its part; as many as no load may ask for are refused."""
    await unload(wire, wire.model)
    request = model_pb2.LoadModelRequest(model=wire.model, validate_only=True)
    (alone,) = await load(wire, request)
    request.options.ranks = 2
    (both,) = await load(wire, request)
    assert (alone.fit.ranks, both.fit.ranks) == (1, 2)
    assert both.fit.device == f"{alone.fit.device}+{alone.fit.device}"
    assert _terms(both.fit)["weights"] < _terms(alone.fit)["weights"]
    request.options.ranks = 3
    assert isinstance(await refusal(load(wire, request)), InvalidRequest)


def _terms(fit: types_pb2.FitReport) -> dict[str, int]:
    return {term.name: term.bytes for term in fit.terms}


@covering("UnloadModelRequest.model", "UnloadModelRequest.grace", "UnloadModelRequest.force")
async def unload_is_idempotent_and_may_be_forced(wire: Wire) -> None:
    """Unloading twice is a success; force ends a stream in progress and says so."""
    await unload(wire, wire.model)
    assert (await unload(wire, wire.model)).streams_aborted == 0
    call = wire.inference.Generate(_endless(LONG))
    wire.recorder.see(await read(call))
    request = model_pb2.UnloadModelRequest(model=LONG, force=True)
    answer = wire.recorder.see(await wire.models.UnloadModel(request))
    assert answer.streams_aborted == 1


@covering("ForgetModelRequest.name")
async def a_name_that_a_load_gave_is_forgotten(wire: Wire) -> None:
    """The folder's others stay, and the model serves on under them."""
    for name in ("third", "fourth"):
        await load(wire, model_pb2.LoadModelRequest(model=str(wire.folder), name=name))
    request = model_pb2.ForgetModelRequest(name="third")
    answer = wire.recorder.see(await wire.models.ForgetModel(request))
    assert "fourth" in answer.names
    assert isinstance(await refusal(wire.models.ForgetModel(request)), ModelNotFound)
    assert (await get(wire, "fourth")).path == str(wire.folder)


def _endless(model: str) -> inference_pb2.GenerateRequest:
    return inference_pb2.GenerateRequest(model=model, text="Once", ignore_eos=True)


@covering("WatchModelsRequest.model")
async def watch_sends_the_state_and_each_change(wire: Wire) -> None:
    """A watcher of one model sees it now, and then its load."""
    await unload(wire, wire.model)
    call = wire.models.WatchModels(model_pb2.WatchModelsRequest(model=wire.model))
    first = wire.recorder.see(await read(call))
    assert first.model.state == types_pb2.MODEL_STATE_UNLOADED
    await load(wire, model_pb2.LoadModelRequest(model=wire.model))
    async for message in call:
        assert wire.recorder.see(message).model.name == wire.model
        if message.model.state == types_pb2.MODEL_STATE_READY:
            break
    call.cancel()


@covering("ReadLogsRequest.model", "ReadLogsRequest.tail", "ReadLogsRequest.follow")
async def a_worker_s_log_is_read(wire: Wire) -> None:
    """All lines that are kept, the last one alone, and what follows to the worker's end."""
    await load(wire, model_pb2.LoadModelRequest(model=wire.model))
    request = model_pb2.ReadLogsRequest(model=wire.model)
    whole = [wire.recorder.see(message) async for message in wire.models.ReadLogs(request)]
    lines = [line for message in whole for line in message.lines]
    request.tail = 1
    (last,) = [message async for message in wire.models.ReadLogs(request)]
    assert lines
    assert list(last.lines) == lines[-1:]
    request.follow = True
    call = wire.models.ReadLogs(request)
    assert list((await read(call)).lines) == lines[-1:]
    await unload(wire, wire.model)
    async with asyncio.timeout(LIMIT_S):
        _ = [message async for message in call]
    assert isinstance(await refusal(read(wire.models.ReadLogs(request))), InvalidRequest)


@covering("GetStatusRequest.model", "WatchStatusRequest.model", "WatchStatusRequest.interval")
async def status_of_one_or_all(wire: Wire) -> None:
    """A model's name filters the workers; a watcher gets a second status after the interval."""
    await load(wire, model_pb2.LoadModelRequest(model=wire.model))
    everything = wire.recorder.see(await wire.status.GetStatus(status_pb2.GetStatusRequest()))
    one = await wire.status.GetStatus(status_pb2.GetStatusRequest(model=wire.model))
    assert {w.model_name for w in one.status.workers if w.state == types_pb2.MODEL_STATE_READY} == {
        wire.model
    }
    assert len(everything.status.workers) >= len(one.status.workers)
    assert isinstance(
        await refusal(wire.status.GetStatus(status_pb2.GetStatusRequest(model="nobody"))),
        ModelNotFound,
    )
    request = status_pb2.WatchStatusRequest(model=wire.model, interval=Duration(nanos=100_000_000))
    call = wire.status.WatchStatus(request)
    stamps = [wire.recorder.see(await read(call)).status.now.ToNanoseconds() for _ in range(3)]
    call.cancel()
    assert stamps[2] - stamps[0] >= 150_000_000


async def pull(wire: Wire, model: str, *include: str) -> list[model_pb2.PullModelResponse]:
    """Return every message of a pull."""
    request = model_pb2.PullModelRequest(model=model, include=include)
    return [wire.recorder.see(step) async for step in wire.models.PullModel(request)]


@covering("PullModelRequest.model", "PullModelRequest.include")
async def a_model_is_pulled(wire: Wire) -> None:
    """From the hub of the server's variables: it is listed then; a pattern takes a file more."""
    (*_, plain) = await pull(wire, ON_HUB)
    (*_, last) = await pull(wire, ON_HUB, "*.md")
    assert last.phase == model_pb2.PullModelResponse.PHASE_DONE
    assert last.pulled.files == plain.pulled.files + 1
    model = await get(wire, ON_HUB)
    assert (model.path, model.digest) == (last.pulled.path, last.pulled.digest)
    assert isinstance(await refusal(pull(wire, f"{ON_HUB}@none")), ModelNotFound)
