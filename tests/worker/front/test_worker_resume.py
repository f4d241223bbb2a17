"""Streams that are resumed over the wire of a real worker process, and what is refused by name."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from mlxd.v1 import inference_pb2, types_pb2
from mlxd_shared.domain.errors import InvalidRequest
from tests.support.tiny_model import VOCAB, write_tiny_model
from tests.support.worker_process import DIGEST, WorkerProcess, running_worker
from tests.worker.front.test_worker_streams import generate, ids_of, refusal, text_of
from tests.worker.made_tokenizers import EOS_ID

pytestmark = pytest.mark.asyncio(loop_scope="module")

CONTEXT = 256
TOKENS = 30
HOT = types_pb2.SamplingOptions(temperature=1.2, top_k=0, top_p=0.95, seed=3)


@pytest_asyncio.fixture(loop_scope="module", scope="module", params=["0", "20"])
async def worker(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[WorkerProcess]:
    """One worker for the whole file: after each refusal the next request must succeed.

    One that replays up to 20 tokens by decoding them, and one that never does.
    """
    folder: Path = write_tiny_model(tmp_path_factory.mktemp("tiny"), context_max=CONTEXT)
    async with running_worker("--replay-steps", request.param) as process:
        await process.load(folder)
        yield process


async def rest_of(
    worker: WorkerProcess, ids: list[int], **fields: Any
) -> list[inference_pb2.GenerateResponse]:
    """Return the messages of a stream that goes on behind `ids`."""
    return await generate(worker, resume_from=len(ids), resume_token_ids=ids, **fields)


@pytest.mark.parametrize("cut", [1, 7, 29])
async def test_the_rest_of_a_stream(worker: WorkerProcess, cut: int) -> None:
    """Offsets go on, ids and text are what follows, and the first message tells as ever."""
    for sampling in (HOT, types_pb2.SamplingOptions(temperature=0, seed=3)):
        whole = await generate(worker, sampling=sampling, max_tokens=TOKENS)
        ids = ids_of(whole)
        rest = await rest_of(worker, ids[:cut], sampling=sampling, max_tokens=TOKENS)

        assert rest[0].offset == cut
        assert ids_of(rest) == ids[cut:]
        assert text_of(whole).endswith(text_of(rest))
        assert (rest[0].model_digest, rest[0].request_id != "") == (DIGEST, True)
        usage_of_whole, usage = whole[-1].usage, rest[-1].usage
        assert usage.prompt_tokens == usage_of_whole.prompt_tokens
        assert usage.completion_tokens == usage_of_whole.completion_tokens == TOKENS
        assert usage.total_tokens == usage_of_whole.total_tokens
        assert (usage.seed, usage.near_ties) == (usage_of_whole.seed, 0)


async def test_the_first_message_tells_the_seed(worker: WorkerProcess) -> None:
    """A seed that was drawn is known before the stream can break off, and continues it."""
    hot = types_pb2.SamplingOptions(temperature=1.5)
    whole = await generate(worker, sampling=hot, max_tokens=TOKENS)
    assert [m.HasField("seed") for m in whole] == [True] + [False] * (len(whole) - 1)
    assert whole[0].seed == whole[-1].usage.seed

    hot.seed = whole[0].seed
    ids = ids_of(whole)
    assert ids_of(await rest_of(worker, ids[:10], sampling=hot, max_tokens=TOKENS)) == ids[10:]


async def test_a_stream_resumed_from_nothing_is_a_whole_one(worker: WorkerProcess) -> None:
    """What had not begun to come needs neither tokens nor a seed."""
    hot = types_pb2.SamplingOptions(temperature=1.5)
    messages = await generate(worker, sampling=hot, resume_from=0)
    assert (messages[0].offset, len(ids_of(messages))) == (0, 12)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"resume_from": 2, "resume_token_ids": [5]}, "resume_from"),
        ({"resume_token_ids": [5]}, "resume_from"),
        ({"resume_from": 12, "resume_token_ids": [5] * 12}, "resume_from"),
        ({"resume_from": 2, "resume_token_ids": [5, VOCAB]}, "resume_token_ids[1]"),
        ({"resume_from": 2, "resume_token_ids": [5, 6], "stop_token_ids": [6]},
         "resume_token_ids[1]"),
        ({"resume_from": 2, "resume_token_ids": [EOS_ID, 6], "ignore_eos": False},
         "resume_token_ids[0]"),
        ({"resume_from": CONTEXT, "resume_token_ids": [5] * CONTEXT, "num_predict": 0},
         "resume_token_ids"),
        ({"resume_from": 1, "resume_token_ids": [5],
          "sampling": types_pb2.SamplingOptions(temperature=1.0)}, "sampling.seed"),
        ({"resume_from": 1, "resume_token_ids": [5], "response_format": {"regex": "[0-9]+"}},
         "resume_token_ids[0]"),
    ],
)  # fmt: skip
async def test_what_cannot_be_resumed_is_refused_by_name(
    worker: WorkerProcess, fields: dict[str, Any], field: str
) -> None:
    """The field and the reason, and the next request is served."""
    error = await refusal(worker, **{"ignore_eos": "response_format" not in fields, **fields})

    assert isinstance(error, InvalidRequest), error
    (violation,) = error.violations
    assert violation.field == field
    assert len(ids_of(await generate(worker))) == 12


async def test_a_context_that_is_nearly_full_is_resumed(worker: WorkerProcess) -> None:
    """The limit that a refusal names is exact, and the stream ends as the whole one does."""
    tokens = inference_pb2.TokenIds(ids=[5] * 200)
    whole = await generate(worker, tokens=tokens, num_predict=0)
    ids = ids_of(whole)
    assert len(ids) == CONTEXT - 200

    rest = await rest_of(worker, ids[:-1], tokens=tokens, num_predict=0)
    assert ids_of(rest) == ids[-1:]
    assert rest[-1].finish == whole[-1].finish
    assert rest[-1].finish.reason == types_pb2.FINISH_REASON_CONTEXT
