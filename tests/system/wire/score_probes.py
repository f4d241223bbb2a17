"""Probes of Score's fields, through the controller."""

from __future__ import annotations

from typing import Any

from mlxd.v1 import score_pb2
from mlxd_shared.domain.errors import InvalidRequest, NoChatTemplate
from tests.system.wire.chat_probes import MODEL
from tests.system.wire.probe import Probes, Wire, refusal

PROBES = Probes()
covering = PROBES.covering
GREETING = score_pb2.ScoredText(text="Once upon a", continuations=[" time", " zebra"])


@covering(
    "ScoreRequest.model",
    "ScoreRequest.texts",
    "ScoreRequest.parse_special_tokens",
    "ScoreRequest.worker_incarnation",
    "ScoredText.text",
    "ScoredText.continuations",
)
async def continuations_are_scored(wire: Wire) -> None:
    """A trained model knows how a story goes on; special tokens are read as such if asked."""

    async def score(text: score_pb2.ScoredText, **fields: Any) -> list[score_pb2.Score]:
        request = score_pb2.ScoreRequest(model=wire.model, texts=[text], **fields)
        answer = wire.recorder.see(await wire.inference.Score(request))
        assert answer.prompt_tokens > answer.scores[0].tokens
        return list(answer.scores)

    time, zebra = await score(GREETING)
    assert time.is_greedy
    assert time.logprob > zebra.logprob
    marked = score_pb2.ScoredText(text="Once", continuations=["<|endoftext|>"])
    (text,), (token,) = await score(marked), await score(marked, parse_special_tokens=True)
    assert token.tokens == 1 < text.tokens
    request = score_pb2.ScoreRequest(model=wire.model, texts=[GREETING], worker_incarnation="x")
    error = await refusal(wire.inference.Score(request))
    assert isinstance(error, InvalidRequest)


@covering("ScoreRequest.reranking", "Reranking.query", "Reranking.instruction")
async def documents_are_judged(wire: Wire) -> None:
    """Query and instruction are part of what is read; a model without a template is refused."""

    async def judge(model: str, **question: str) -> score_pb2.ScoreResponse:
        texts = [score_pb2.ScoredText(text="A king.", continuations=["yes", "no"])]
        reranking = score_pb2.Reranking(**question)
        request = score_pb2.ScoreRequest(model=model, texts=texts, reranking=reranking)
        return wire.recorder.see(await wire.inference.Score(request))

    short, long, instructed = [
        (await judge(MODEL, **question)).prompt_tokens
        for question in (
            {"query": "Who?"},
            {"query": "Who was he then?"},
            {"query": "Who?", "instruction": "Find the names of kings, and of nobody else at all, "
             "in whatever language they are and however they are written."},
        )
    ]  # fmt: skip
    assert short < long < instructed
    assert isinstance(await refusal(judge(wire.model, query="Who?")), NoChatTemplate)
    assert isinstance(await refusal(judge(MODEL)), InvalidRequest)
