"""What a controller does with a real worker process: load, unload, shrink, drain, watch."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
from google.protobuf.duration_pb2 import Duration
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from mlxd.v1 import inference_pb2, types_pb2, worker_pb2
from mlxd_shared.domain.errors import (
    InvalidModel,
    InvalidRequest,
    LoadAbandoned,
    MlxdError,
    ModelDraining,
    ModelNotFound,
    ModelUnloaded,
    WrongWorker,
)
from mlxd_shared.wire.status import from_call
from tests.support.calls import endless, error_of, greedy, health, ids
from tests.support.tiny_model import VOCAB, write_tiny_model
from tests.support.worker_process import DIGEST, WorkerProcess, running_worker

LONG_CONTEXT = 32_768
SERVICES = ("mlxd.v1.InferenceService", "mlxd.v1.StatusService", "mlxd.v1.WorkerService")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with room for long streams."""
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), context_max=LONG_CONTEXT)


@pytest_asyncio.fixture
async def worker() -> AsyncIterator[WorkerProcess]:
    """A fresh worker without a model."""
    async with running_worker() as process:
        yield process


@pytest.mark.asyncio
async def test_a_load_says_how_far_it_is(worker: WorkerProcess, folder: Path) -> None:
    """Bytes only grow, the last message is ready with all of them, and Status agrees."""
    messages = await worker.load(folder, context_length=256, rows_max=2)

    read = [message.progress.bytes_read for message in messages]
    assert read == sorted(read)
    assert messages[-1].progress.stage == "ready"
    assert messages[-1].progress.bytes_read == messages[-1].progress.bytes_total > 0
    status = await worker.fresh_status()
    assert status.state == types_pb2.MODEL_STATE_READY
    assert (status.model_name, status.model_digest) == ("tiny", DIGEST)
    assert status.model_path == str(folder)
    assert (status.context_length, status.rows_max) == (256, 2)
    assert status.context_length_max == LONG_CONTEXT
    assert status.weights == types_pb2.WEIGHTS_FORMAT_FLOAT32
    assert (status.pid, status.incarnation) == (worker.pid, worker.incarnation)
    assert status.address == worker.address
    assert status.math_library.name
    assert status.backend.startswith("mlx-")
    assert status.cpu_seconds > 0
    assert status.memory.resident_bytes > status.memory.total_bytes > 0
    # The model's own temperature, and the documented defaults for the rest.
    assert status.effective_sampling.temperature == pytest.approx(0.7)
    assert status.effective_sampling.top_k == 40


@pytest.mark.asyncio
async def test_a_second_load_must_be_the_same(worker: WorkerProcess, folder: Path) -> None:
    """What is loaded already is a success, even twice at once; anything else is refused."""
    both = await asyncio.gather(worker.load(folder), worker.load(folder))
    assert [messages[-1].progress.stage for messages in both] == ["ready", "ready"]

    cases: tuple[tuple[dict[str, Any], type[MlxdError]], ...] = (
        ({"name": "other"}, WrongWorker),
        ({"digest": "e" * 64}, WrongWorker),
        ({"rows_max": 2}, InvalidRequest),
        ({"prefix_cache_bytes": 1}, InvalidRequest),
    )
    for fields, error in cases:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await worker.load(folder, **fields)
        assert isinstance(from_call(caught.value), error)
    assert len(await ids(worker)) == 10


@pytest.mark.asyncio
async def test_a_load_that_fails_leaves_nothing(
    worker: WorkerProcess, folder: Path, tmp_path: Path
) -> None:
    """Bad models and options are refused by name, hold no bytes, and the next load succeeds."""
    broken = write_tiny_model(tmp_path / "broken")
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    untokenised = write_tiny_model(tmp_path / "untokenised")
    (untokenised / "tokenizer.json").unlink()
    speechless = write_tiny_model(tmp_path / "speechless", nan_token=0)
    cases: tuple[tuple[Path, dict[str, Any], type[MlxdError], str], ...] = (
        (speechless, {}, InvalidModel, "cannot generate with weights as F32"),
        (broken, {}, InvalidModel, "model.safetensors"),
        (untokenised, {}, InvalidModel, "tokenizer.json"),
        (tmp_path / "absent", {}, InvalidModel, "absent"),
        (folder, {"context_length": LONG_CONTEXT + 1}, InvalidRequest, str(LONG_CONTEXT)),
        (folder, {"sampling": {"logit_bias": {VOCAB: 1.0}}}, InvalidRequest, f"[{VOCAB}]"),
        (folder, {"kv_format": types_pb2.KV_FORMAT_Q8}, InvalidRequest, "heads of 8 values"),
    )
    for path, options, kind, needle in cases:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await worker.load(path, **options)
        error = from_call(caught.value)
        assert isinstance(error, kind)
        assert needle in error.describe()
        status = await worker.fresh_status()
        assert status.state == types_pb2.MODEL_STATE_FAILED
        assert needle in status.last_error
        assert status.memory.mlx_active_bytes < 1024
    await worker.load(folder, weights=types_pb2.WEIGHTS_FORMAT_NVFP4)
    assert len(await ids(worker)) == 10
    status = await worker.fresh_status()
    assert (status.last_error, status.weights) == ("", types_pb2.WEIGHTS_FORMAT_NVFP4)


@pytest.mark.asyncio
async def test_unload_gives_everything_back(worker: WorkerProcess, folder: Path) -> None:
    """Idle, every byte has an account; unloaded, none is left; loaded again, all is as before."""
    await worker.load(folder)
    first = await ids(worker)
    status = await worker.until(lambda status: status.streams_running == 0)
    memory = status.memory
    tolerance = (64 << 10) + memory.mlx_active_bytes // 1000
    assert abs(memory.unaccounted_bytes) <= tolerance
    assert abs(memory.mlx_active_bytes - memory.total_bytes) <= tolerance
    assert memory.total_bytes == sum(account.bytes for account in memory.accounts)

    request = worker_pb2.UnloadRequest(worker_incarnation=worker.incarnation)
    assert (await worker.control.Unload(request)).mlx_active_bytes < 1024
    assert (await worker.control.Unload(request)).mlx_active_bytes < 1024
    assert isinstance(await error_of(worker.inference.Generate(greedy())), ModelNotFound)
    assert (await worker.fresh_status()).state == types_pb2.MODEL_STATE_UNLOADED

    await worker.load(folder)
    assert await ids(worker) == first


@pytest.mark.asyncio
async def test_unload_ends_streams_in_flight(worker: WorkerProcess, folder: Path) -> None:
    """A stream that an unload ends is told so, and holds nothing up."""
    await worker.load(folder)
    call = await endless(worker)

    request = worker_pb2.UnloadRequest(worker_incarnation=worker.incarnation)
    assert (await worker.control.Unload(request)).mlx_active_bytes < 1024

    error = await error_of(call)
    assert isinstance(error, ModelUnloaded)
    assert error.model == "tiny"


@pytest.mark.asyncio
async def test_unload_beside_everything_else(worker: WorkerProcess, folder: Path) -> None:
    """Loads and unloads at once come to one end: nothing, and from there a load succeeds."""
    request = worker_pb2.UnloadRequest(worker_incarnation=worker.incarnation)
    loads = [asyncio.ensure_future(worker.load(folder)) for _ in range(2)]
    await worker.until(lambda status: status.state != types_pb2.MODEL_STATE_UNLOADED)
    answers = await asyncio.gather(*(worker.control.Unload(request) for _ in range(3)))
    await asyncio.wait(loads)

    assert all(answer.mlx_active_bytes < 1024 for answer in answers)
    for load in loads:
        error = load.exception()
        if error is not None:
            assert isinstance(error, grpc.aio.AioRpcError)
            assert isinstance(from_call(error), LoadAbandoned | ModelDraining)
    assert (await worker.fresh_status()).state == types_pb2.MODEL_STATE_UNLOADED
    await worker.load(folder)
    assert len(await ids(worker)) == 10


@pytest.mark.asyncio
async def test_shrink_empties_the_pool(worker: WorkerProcess, folder: Path) -> None:
    """A target above what is held changes nothing; 0 leaves the accounts alone."""
    await worker.load(folder)
    await ids(worker)
    await worker.until(lambda status: status.streams_running == 0)
    request = worker_pb2.ShrinkRequest(worker_incarnation=worker.incarnation, target_bytes=1 << 50)

    kept = await worker.control.Shrink(request)
    request.target_bytes = 0
    shrunk = await worker.control.Shrink(request)

    assert kept.bytes_before == kept.bytes_after == shrunk.bytes_before > shrunk.bytes_after
    memory = (await worker.fresh_status()).memory
    assert memory.mlx_cache_bytes == 0
    assert shrunk.bytes_after == memory.mlx_active_bytes


@pytest.mark.asyncio
async def test_drain_takes_no_more_and_waits(worker: WorkerProcess, folder: Path) -> None:
    """New streams are refused, old ones counted until they end."""
    await worker.load(folder)
    assert await health(worker.channel, "models/tiny") == health_pb2.HealthCheckResponse.SERVING
    call = await endless(worker)
    request = worker_pb2.DrainRequest(
        worker_incarnation=worker.incarnation, grace=Duration(nanos=1_000_000)
    )

    assert (await worker.control.Drain(request)).streams_left == 1
    assert isinstance(await error_of(worker.inference.Generate(greedy())), ModelDraining)
    assert await health(worker.channel, "models/tiny") == health_pb2.HealthCheckResponse.NOT_SERVING
    assert await health(worker.channel, "") == health_pb2.HealthCheckResponse.SERVING
    call.cancel()
    request.grace.FromSeconds(30)
    assert (await worker.control.Drain(request)).streams_left == 0


@pytest.mark.asyncio
async def test_only_its_own_controller_is_obeyed(worker: WorkerProcess, folder: Path) -> None:
    """Every order must name this incarnation; another's, or none, is refused."""
    for name in ("other", ""):
        orders = (
            worker.control.Load(worker_pb2.LoadRequest(worker_incarnation=name)),
            worker.control.Unload(worker_pb2.UnloadRequest(worker_incarnation=name)),
            worker.control.Shrink(worker_pb2.ShrinkRequest(worker_incarnation=name)),
            worker.control.Drain(worker_pb2.DrainRequest(worker_incarnation=name)),
            worker.control.Shutdown(worker_pb2.ShutdownRequest(worker_incarnation=name)),
        )
        for order in orders:
            assert isinstance(await error_of(order), WrongWorker)


@pytest.mark.asyncio
async def test_status_answers_while_a_long_prompt_is_read(
    worker: WorkerProcess, folder: Path
) -> None:
    """Many statuses come while one prompt is prefilled, before its first token."""
    await worker.load(folder)
    prompt = inference_pb2.TokenIds(ids=[5] * (LONG_CONTEXT - 2))
    call = worker.inference.Generate(greedy(tokens=prompt, max_tokens=1))
    first = asyncio.ensure_future(anext(aiter(call)))
    await worker.until(lambda status: status.kv_tokens_used > 0)

    for _ in range(5):
        assert (await worker.own_status()).streams_running == 1

    assert not first.done()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    freed = await worker.until(lambda status: status.streams_running == 0)
    assert freed.kv_tokens_used == 0


@pytest.mark.asyncio
async def test_services_are_listed_and_healthy(worker: WorkerProcess) -> None:
    """Health knows the process and each service; reflection lists them."""
    for name in ("", *SERVICES):
        assert await health(worker.channel, name) == health_pb2.HealthCheckResponse.SERVING
    channel: Any = worker.channel
    stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
    call = stub.ServerReflectionInfo(
        iter([reflection_pb2.ServerReflectionRequest(list_services="")])
    )
    answer = await anext(aiter(call))
    names = {service.name for service in answer.list_services_response.service}
    assert {*SERVICES, "grpc.health.v1.Health"} <= names
