"""Continuations to score at the wire's edge: what arrives, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from mlxd.v1 import score_pb2 as pb
from mlxd_shared import config
from mlxd_shared.domain.errors import InvalidRequest
from mlxd_shared.domain.requests import Reranking, ScoredText, ScoreSpec
from mlxd_shared.wire.convert_score import score_from_pb

GOOD = pb.ScoredText(text="a", continuations=["b", "c"])


def test_texts_arrive_as_they_were_sent() -> None:
    """Absent is None; a controller's check is not repeated."""
    spec = score_from_pb(pb.ScoreRequest(model="m", texts=[GOOD]))
    assert spec == ScoreSpec("m", (ScoredText("a", ("b", "c")),))
    parsed = pb.ScoreRequest(texts=[GOOD], parse_special_tokens=True, worker_incarnation="w")
    assert score_from_pb(parsed) == ScoreSpec("", spec.texts, True, "w")
    assert score_from_pb(pb.ScoreRequest(), is_checked=True).texts == ()
    judged = pb.ScoreRequest(texts=[GOOD], reranking=pb.Reranking(query="q", instruction="i"))
    assert score_from_pb(judged).reranking == Reranking("q", "i")


@pytest.mark.parametrize(
    ("texts", "field"),
    [
        ([], "texts"),
        ([GOOD] * (config.SCORE_TEXTS_MAX + 1), "texts"),
        ([GOOD, pb.ScoredText(continuations=["b"])], "texts[1].text"),
        ([pb.ScoredText(text="a")], "texts[0].continuations"),
        ([pb.ScoredText(text="a", continuations=["b", ""])], "texts[0].continuations"),
        (
            [pb.ScoredText(text="a", continuations=["b"] * (config.SCORE_CONTINUATIONS_MAX + 1))],
            "texts[0].continuations",
        ),
        ([pb.ScoredText(text="a" * config.PROMPT_CHARS_MAX, continuations=["b"])], "texts"),
    ],
)
def test_what_cannot_be_scored_is_refused_by_name(texts: list[pb.ScoredText], field: str) -> None:
    """The first that is wrong is told with its place."""
    with pytest.raises(InvalidRequest) as caught:
        score_from_pb(pb.ScoreRequest(texts=texts))
    assert [violation.field for violation in caught.value.violations] == [field]


@pytest.mark.parametrize(
    ("reranking", "fields", "field"),
    [
        (pb.Reranking(), {}, "reranking.query"),
        (pb.Reranking(query="a" * config.PROMPT_CHARS_MAX), {}, "texts"),
        (pb.Reranking(query="a", instruction="b" * config.PROMPT_CHARS_MAX), {}, "texts"),
        (pb.Reranking(query="a"), {"parse_special_tokens": True}, "parse_special_tokens"),
    ],
)
def test_a_question_that_makes_no_sense_is_refused_by_name(
    reranking: pb.Reranking, fields: dict[str, Any], field: str
) -> None:
    """Its characters count with those of the texts; what is spelled never steers."""
    with pytest.raises(InvalidRequest) as caught:
        score_from_pb(pb.ScoreRequest(texts=[GOOD], reranking=reranking, **fields))
    assert [violation.field for violation in caught.value.violations] == [field]
