"""Probes of Score's fields, through the controller."""

from __future__ import annotations

from typing import Any

from mlxd.v1 import inference_pb2
from mlxd_shared.domain.errors import InvalidRequest
from tests.system.wire.probe import Probes, Wire, refusal

PROBES = Probes()
covering = PROBES.covering
GREETING = inference_pb2.ScoredText(text="Once upon a", continuations=[" time", " zebra"])


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

    async def score(text: inference_pb2.ScoredText, **fields: Any) -> list[inference_pb2.Score]:
        request = inference_pb2.ScoreRequest(model=wire.model, texts=[text], **fields)
        answer = wire.recorder.see(await wire.inference.Score(request))
        assert answer.prompt_tokens > answer.scores[0].tokens
        return list(answer.scores)

    time, zebra = await score(GREETING)
    assert time.is_greedy
    assert time.logprob > zebra.logprob
    marked = inference_pb2.ScoredText(text="Once", continuations=["<|endoftext|>"])
    (text,), (token,) = await score(marked), await score(marked, parse_special_tokens=True)
    assert token.tokens == 1 < text.tokens
    request = inference_pb2.ScoreRequest(model=wire.model, texts=[GREETING], worker_incarnation="x")
    error = await refusal(wire.inference.Score(request))
    assert isinstance(error, InvalidRequest)
