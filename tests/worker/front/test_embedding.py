"""Vectors of texts: those of the model's own states, in turn with streams, and bounded."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import mlx.core as mx
import pytest
import pytest_asyncio

from mlxd.v1 import inference_pb2 as pb
from mlxd_models.sizes.weight_forms import FloatType
from mlxd_shared.domain.errors import InvalidModel, InvalidRequest, MlxdError, WrongWorker
from mlxd_shared.wire.status import from_call
from mlxd_worker.cache.base import RowId
from mlxd_worker.cache.rows import RowCaches
from mlxd_worker.models.base import Batch
from mlxd_worker.models.loader import inspect_model, load_model
from mlxd_worker.tokenizing.files import load_tokenizer
from tests.support.tiny_model import HIDDEN, write_tiny_model
from tests.support.worker_process import DIGEST, WorkerProcess, running_worker
from tests.worker.front.test_worker_streams import generate, ids_of, request_of

pytestmark = pytest.mark.asyncio(loop_scope="module")

LONG = "once upon a time there was a little fox " * 30
TEXTS = ["a", "the fox said hello", LONG]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), context_max=1024)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def worker(folder: Path) -> AsyncIterator[WorkerProcess]:
    """One worker for the whole file."""
    async with running_worker() as process:
        await process.load(folder, rows_max=2)
        yield process


async def vectors(worker: WorkerProcess, *texts: str, **fields: Any) -> list[list[float]]:
    answer = await worker.inference.Embed(pb.EmbedRequest(texts=texts, **fields))
    assert answer.model_digest == DIGEST
    return [list(vector.values) for vector in answer.embeddings]


async def refusal(worker: WorkerProcess, **fields: Any) -> MlxdError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await worker.inference.Embed(pb.EmbedRequest(**fields))
    return from_call(caught.value)


def states_of(folder: Path, text: str) -> list[list[float]]:
    """Return the hidden state of every token, from one pass of the model by itself."""
    model = load_model(inspect_model(folder), form=FloatType.F32, progress=lambda *_: None)
    ids = load_tokenizer(folder).encode(text)
    caches = RowCaches(model.new_caches(), context_max=1024, rows_max=1)
    caches.join(RowId(0), tokens=len(ids), tokens_max=len(ids), coming=1)
    caches.reserve(RowId(0), tokens=len(ids))
    hidden = model.forward(Batch.prefill(ids, 0, RowId(0)), caches)
    mx.eval(hidden)
    values: list[list[float]] = hidden.tolist()  # type: ignore[assignment]
    return values


@pytest.mark.parametrize("pooling", [pb.POOLING_LAST_TOKEN, pb.POOLING_MEAN])
async def test_a_vector_is_pooled_from_the_models_states(
    worker: WorkerProcess, folder: Path, pooling: pb.Pooling.ValueType
) -> None:
    """The last token's state, or the mean of all, however the text is cut into chunks."""
    embeddings = await vectors(worker, *TEXTS, pooling=pooling, normalize=False)
    for text, vector in zip(TEXTS, embeddings, strict=True):
        states = states_of(folder, text)
        mean = [math.fsum(column) / len(states) for column in zip(*states, strict=True)]
        expected = mean if pooling == pb.POOLING_MEAN else states[-1]
        assert len(vector) == HIDDEN
        size = max(map(abs, expected))
        assert max(abs(a - b) for a, b in zip(vector, expected, strict=True)) <= 1e-4 * size


async def test_a_vector_is_shortened_and_then_scaled(worker: WorkerProcess) -> None:
    """Length 1 by default, also of a part; absent pooling is the last token's."""
    (raw,) = await vectors(worker, TEXTS[1], normalize=False)
    (last,) = await vectors(worker, TEXTS[1], pooling=pb.POOLING_LAST_TOKEN, normalize=False)
    (part,) = await vectors(worker, TEXTS[1], dimensions=4)
    assert raw == last
    length = math.hypot(*raw[:4])
    assert part == pytest.approx([value / length for value in raw[:4]], abs=1e-6)


async def test_vectors_do_not_depend_on_company(worker: WorkerProcess) -> None:
    """Many texts beside a stream: each vector as if alone, and the stream goes on meanwhile."""
    alone = [(await vectors(worker, text))[0] for text in TEXTS]
    undisturbed = ids_of(await generate(worker, max_tokens=200))
    together: asyncio.Task[list[list[float]]] | None = None
    ids: list[int] = []
    async for message in worker.inference.Generate(request_of(max_tokens=200)):
        together = together or asyncio.create_task(vectors(worker, *TEXTS * 20))
        ids += message.token_ids
    assert ids == undisturbed
    assert together is not None
    embeddings = await together
    for index, vector in enumerate(embeddings):
        assert vector == pytest.approx(alone[index % len(TEXTS)], abs=1e-4)


async def test_nothing_of_it_stays(worker: WorkerProcess) -> None:
    """No row, no snapshot and no byte is left of texts, nor of a call that was given up."""
    before = await worker.sweep()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await worker.inference.Embed(pb.EmbedRequest(texts=[LONG] * 256), timeout=0.1)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await worker.until(lambda status: status.streams_running + status.streams_waiting == 0)
    await vectors(worker, *TEXTS)
    # Had the worker not come to the call by the first look, it has by now.
    await worker.until(lambda status: status.streams_running + status.streams_waiting == 0)
    after = await worker.sweep()
    assert list(after.memory.accounts) == list(before.memory.accounts)
    assert abs(after.memory.unaccounted_bytes) < 1 << 12


async def test_what_cannot_be_read_names_its_text(worker: WorkerProcess) -> None:
    """A text too long, too many dimensions, another worker: by field; the next one is served."""
    error = await refusal(worker, texts=["a", LONG * 9])
    assert isinstance(error, InvalidRequest)
    assert error.violations[0].field == "texts[1]"
    error = await refusal(worker, texts=["a"], dimensions=HIDDEN + 1)
    assert isinstance(error, InvalidRequest)
    assert error.violations[0].field == "dimensions"
    assert str(HIDDEN) in error.violations[0].description
    error = await refusal(worker, texts=["x"] * 257, pooling=9)
    assert isinstance(error, InvalidRequest)
    assert [v.field for v in error.violations] == ["texts", "pooling"]
    assert isinstance(await refusal(worker, texts=["a"], worker_incarnation="x"), WrongWorker)
    assert len(await vectors(worker, "a")) == 1


async def test_an_absent_pooling_is_the_models_own(tmp_path: Path) -> None:
    """What its files say, scaling included; one that is not served names the file."""
    folder = write_tiny_model(tmp_path / "tiny", context_max=1024)
    (folder / "1_Pooling").mkdir()
    settings = folder / "1_Pooling" / "config.json"
    settings.write_text('{"pooling_mode": "mean"}')
    module = '{"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"}'
    (folder / "modules.json").write_text(f"[{module}]")
    async with running_worker() as process:
        await process.load(folder)
        own, mean = [
            await vectors(process, "a fox", **fields)
            for fields in ({}, {"pooling": pb.POOLING_MEAN, "normalize": False})
        ]
        assert own == mean
    settings.write_text('{"pooling_mode": "cls"}')
    async with running_worker() as process:
        await process.load(folder)
        error = await refusal(process, texts=["a"])
        assert isinstance(error, InvalidModel)
        assert error.file == "1_Pooling/config.json"
        assert len(await vectors(process, "a", pooling=pb.POOLING_MEAN)) == 1
