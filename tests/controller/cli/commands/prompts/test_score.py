"""`mlxd score` as a process against a scripted server."""

from __future__ import annotations

import pytest

from mlxd.v1 import score_pb2 as pb
from mlxd_shared.config import SCORE_CONTINUATIONS_MAX
from tests.fakes.mlxd_server import Answers, serving
from tests.support.cli import mlxd


@pytest.mark.asyncio
async def test_each_continuation_is_a_line() -> None:
    """Log-probability, tokens and text, or JSON; every flag arrives in its field."""
    async with serving(Answers()) as fake:
        ran = await mlxd("score", "demo", "Once", " upon", "\t", "--address", fake.address)
        programs = await mlxd(
            "score", "demo", "a king", "--json", "--query", "who?", "--instruction", "find",
            "--address", fake.address, piped="yes\nno\n",
        )  # fmt: skip
        await mlxd("score", "demo", "a", "</s>", "--special", "--address", fake.address)
        plain, asking, special = fake.requests

    assert (ran.code, ran.out) == (0, "   -5.0000     1   ' upon'\n   -1.0000     1   '\\t'\n")
    assert programs.objects == [
        {"continuation": text, "logprob": -len(text), "tokens": 1, "is_greedy": False}
        for text in ("yes", "no")
    ]
    scored = pb.ScoredText(text="Once", continuations=[" upon", "\t"])
    assert plain == pb.ScoreRequest(model="demo", texts=[scored])
    assert asking == pb.ScoreRequest(
        model="demo",
        texts=[pb.ScoredText(text="a king", continuations=["yes", "no"])],
        reranking=pb.Reranking(query="who?", instruction="find"),
    )
    assert isinstance(special, pb.ScoreRequest)
    assert special.parse_special_tokens


@pytest.mark.asyncio
async def test_more_than_a_request_takes_are_asked_for_in_turn() -> None:
    """In their order, and none is left out."""
    texts = ["x" * (1 + index) for index in range(SCORE_CONTINUATIONS_MAX + 1)]
    async with serving(Answers()) as fake:
        ran = await mlxd("score", "demo", "a", "--address", fake.address, piped="\n".join(texts))
        sizes = [
            len(r.texts[0].continuations) for r in fake.requests if isinstance(r, pb.ScoreRequest)
        ]

    assert [line.split()[-1] for line in ran.out.splitlines()] == [repr(text) for text in texts]
    assert sizes == [SCORE_CONTINUATIONS_MAX, 1]


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("options", "problem"),
    [((), "no continuation"), (("yes", "--instruction", "find"), "--query")],
)
async def test_what_says_nothing_is_bad_usage(options: tuple[str, ...], problem: str) -> None:
    """Nothing is asked of the server."""
    async with serving(Answers()) as fake:
        ran = await mlxd("score", "demo", "a", *options, "--address", fake.address, piped="")

    assert (ran.code, ran.out, fake.requests) == (2, "", [])
    assert problem in ran.err
