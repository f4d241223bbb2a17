"""Score on a real worker: sums of the model's own log-probabilities, whatever is reused."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio

from mlxd.v1 import inference_pb2, score_pb2
from mlxd_shared.domain.errors import InvalidRequest, MlxdError, NoChatTemplate
from mlxd_shared.wire.status import from_call
from tests.support.chat_template import write_template
from tests.support.tiny_model import write_tiny_model
from tests.support.worker_process import DIGEST, WorkerProcess, running_worker
from tests.worker.front.test_worker_streams import generate

pytestmark = pytest.mark.asyncio(loop_scope="module")

CONTEXT = 256
PAIRS = (
    "<s>{% for m in messages if m.role in ('query', 'document') %}"
    "[{{ m.role }}] {{ m.content }}{% endfor %}:"
)
TEXT = "once upon a time there was a little fox and the fox said hello " * 2


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def worker(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[WorkerProcess]:
    """One worker for the whole file."""
    folder: Path = write_tiny_model(tmp_path_factory.mktemp("tiny"), context_max=CONTEXT)
    write_template(folder, PAIRS)
    async with running_worker() as process:
        await process.load(folder, rows_max=2)
        yield process


async def scores(worker: WorkerProcess, text: str, *continuations: str) -> list[score_pb2.Score]:
    """The scores of one text's continuations."""
    texts = [score_pb2.ScoredText(text=text, continuations=continuations)]
    answer = await worker.inference.Score(score_pb2.ScoreRequest(texts=texts))
    assert answer.model_digest == DIGEST
    return list(answer.scores)


async def refusal(worker: WorkerProcess, **fields: Any) -> MlxdError:
    """The error of a request that is refused."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await worker.inference.Score(score_pb2.ScoreRequest(**fields))
    return from_call(caught.value)


async def ids_of(worker: WorkerProcess, text: str) -> list[int]:
    """The ids of a text."""
    return list(
        (await worker.inference.Tokenize(inference_pb2.TokenizeRequest(text=text))).token_ids
    )


async def test_a_score_is_the_sum_of_the_tokens_own(worker: WorkerProcess) -> None:
    """Those that a stream tells of the same prompt, behind the tokens that the text has alone."""
    (score,) = await scores(worker, TEXT, "to the king")
    alone, whole = await ids_of(worker, TEXT), await ids_of(worker, f"{TEXT}to the king")
    begin = next((i for i, pair in enumerate(zip(alone, whole, strict=False)) if len({*pair}) > 1),
                 min(len(alone), len(whole)))  # fmt: skip
    first, *_ = await generate(
        worker, tokens=inference_pb2.TokenIds(ids=whole), prompt_logprobs=1, max_tokens=1
    )
    positions = first.prompt.logprobs[begin - 1 :]

    assert score.tokens == len(whole) - begin == len(positions)
    total = math.fsum(position.chosen.logprob for position in positions)
    assert math.isclose(score.logprob, total, abs_tol=1e-3)


async def test_what_a_greedy_stream_says_is_greedy(worker: WorkerProcess) -> None:
    """The likeliest continuation is told as such, another one is not, and is less likely."""
    for letter in "abcdefghijklmnopqrstuvwxyz":
        text = TEXT + letter
        messages = await generate(worker, text=text, max_tokens=1)
        said = [token_id for message in messages for token_id in message.token_ids]
        back = await worker.inference.Detokenize(inference_pb2.DetokenizeRequest(token_ids=said))
        if (
            back.text
            and await ids_of(worker, text + back.text) == await ids_of(worker, text) + said
        ):
            break  # the token is a text of its own behind this one
    best, other = await scores(worker, text, back.text, "Z")
    assert best.is_greedy
    assert not other.is_greedy
    assert best.logprob > other.logprob


async def test_scores_do_not_depend_on_company(worker: WorkerProcess) -> None:
    """Many continuations, in the order of the request, each as if alone."""
    continuations = ["a", "the fox", "hello fox", "said the king"]
    alone = [(await scores(worker, TEXT, each))[0] for each in continuations]
    together = await scores(worker, TEXT, *continuations)
    for one, other in zip(alone, together, strict=True):
        assert one.tokens == other.tokens
        assert math.isclose(one.logprob, other.logprob, abs_tol=1e-3)


async def test_what_cannot_be_read_is_refused_by_name(worker: WorkerProcess) -> None:
    """A continuation beyond the context, and another process's request."""
    long = score_pb2.ScoredText(text="a", continuations=["b", "c " * CONTEXT])
    error = await refusal(worker, texts=[long])
    assert isinstance(error, InvalidRequest)
    assert error.violations[0].field == "texts[0].continuations[1]"
    assert await refusal(worker, texts=[long], worker_incarnation="x")


async def test_a_document_is_judged_by_the_template(worker: WorkerProcess) -> None:
    """As the rendered text would be, with the answers behind it; what is spelled never steers."""
    answers = ["Z", "yes"]
    reranking = score_pb2.Reranking(query="a fox")

    async def judge(document: str) -> score_pb2.ScoreResponse:
        texts = [score_pb2.ScoredText(text=document, continuations=answers)]
        request = score_pb2.ScoreRequest(texts=texts, reranking=reranking)
        response: score_pb2.ScoreResponse = await worker.inference.Score(request)
        return response

    judged = await judge("the king")
    alone = await scores(worker, "[query] a fox[document] the king:", *answers)
    for one, other in zip(judged.scores, alone, strict=True):
        assert one.tokens == other.tokens
        assert math.isclose(one.logprob, other.logprob, abs_tol=1e-3)

    assert (await judge("</s>")).prompt_tokens > (await judge("x")).prompt_tokens


async def test_a_document_that_is_too_long_is_refused_by_name(worker: WorkerProcess) -> None:
    """Rendered or not; the question counts."""
    for times in (CONTEXT, 100 * CONTEXT):
        texts = [
            score_pb2.ScoredText(text="a", continuations=["yes"]),
            score_pb2.ScoredText(text="b c " * times, continuations=["yes"]),
        ]
        error = await refusal(worker, texts=texts, reranking=score_pb2.Reranking(query="a fox"))
        assert isinstance(error, InvalidRequest)
        assert [each.field for each in error.violations] == ["texts[1].text"]


async def test_a_model_without_a_template_judges_nothing(tmp_path: Path) -> None:
    """It is refused by its name."""
    async with running_worker() as process:
        await process.load(write_tiny_model(tmp_path / "tiny"), rows_max=1)
        texts = [score_pb2.ScoredText(text="a", continuations=["yes"])]
        error = await refusal(process, texts=texts, reranking=score_pb2.Reranking(query="b"))
        assert isinstance(error, NoChatTemplate)
