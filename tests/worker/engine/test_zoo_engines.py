"""Models through mlx-lm in engines: chunks, company and kept prefixes change no text."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest

from mlxd.v1 import inference_pb2, types_pb2
from mlxd_shared.domain.errors import FieldNotServed, InvalidRequest, MlxdError
from mlxd_shared.wire.status import from_call
from tests.support.engines import tiny_engine
from tests.support.tiny_model import VOCAB, write_text_files
from tests.support.worker_process import running_worker
from tests.worker.front.test_worker_streams import generate, ids_of
from tests.worker.hybrid import token_ids
from tests.worker.zoo import write_zoo, zoo_config

SERVED = ["exaone4", "granitemoehybrid"]
"""Windows beside full attention; states beside experts."""


def folder_of(name: str, folder: Path) -> Path:
    """Write a model with a tokenizer."""
    write_zoo(folder, zoo_config(name, vocab_size=VOCAB))
    write_text_files(folder)
    return folder


@pytest.mark.parametrize("name", SERVED)
def test_chunks_and_company_change_no_text(name: str, tmp_path: Path) -> None:
    """Prompts of several lengths, cut and decoded together, give what each gives alone, whole."""
    folder = folder_of(name, tmp_path)
    prompts = [token_ids(length, seed=length, vocab=200) for length in (90, 1, 31)]
    engine = tiny_engine(folder, chunk=7)
    sinks = [engine.submit(prompt, max_tokens=12)[1] for prompt in prompts]

    engine.run()

    alone = tiny_engine(folder, chunk=64)
    assert [sink.ids for sink in sinks] == [
        alone.alone(prompt, max_tokens=12).ids for prompt in prompts
    ]


@pytest.mark.parametrize("name", [*SERVED, "mimo_v2_flash"])
def test_a_kept_prefix_changes_no_text(name: str, tmp_path: Path) -> None:
    """A second turn, resumed from what was kept, says what it says from nothing."""
    folder = folder_of(name, tmp_path)
    engine, plain = tiny_engine(folder, prefix_nbytes=64 << 20), tiny_engine(folder)
    text = token_ids(60, seed=1, vocab=200)
    first = engine.alone(text, max_tokens=12)
    text = [*text, *first.ids, *token_ids(9, seed=2, vocab=200)]

    second = engine.alone(text, max_tokens=12)

    assert second.ids == plain.alone(text, max_tokens=12).ids
    assert second.finished.usage.cached_tokens >= 60


@pytest.mark.asyncio
async def test_a_worker_serves_it_and_refuses_what_it_cannot(tmp_path: Path) -> None:
    """A process loads one, streams the engine's tokens, and names what is not served."""
    folder = folder_of("granitemoehybrid", tmp_path)
    prompt = token_ids(20, seed=3, vocab=200)
    async with running_worker() as process:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await process.load(folder, rows_max=2, kv_format=types_pb2.KV_FORMAT_Q8)
        assert isinstance(from_call(refused.value), InvalidRequest)
        await process.load(folder, rows_max=2)

        tokens = inference_pb2.TokenIds(ids=prompt)
        said = ids_of(await generate(process, tokens=tokens, max_tokens=12))
        with pytest.raises(grpc.aio.AioRpcError) as unserved:
            await process.inference.Embed(inference_pb2.EmbedRequest(texts=["a"]))

    error: MlxdError = from_call(unserved.value)
    assert isinstance(error, FieldNotServed)
    assert said == tiny_engine(folder).alone(prompt, max_tokens=12).ids
