"""How relevances are made of scores and of vectors, and who names which field."""

from __future__ import annotations

import math

import pytest

from mlxd import Embeddings, Score, Scores
from mlxd_gateway.cohere.ranking import Ranking, judge, measure, name_score, name_vector


def test_a_share_is_that_of_yes_alone() -> None:
    """Of what is left when all other answers are left out; far apart, it is 0 or 1."""
    pairs = [(math.log(0.6), math.log(0.2)), (-1.0, -1.0), (-2000.0, 0.0), (0.0, -2000.0)]
    scores = tuple((Score(yes, 1, False), Score(no, 1, False)) for yes, no in pairs)
    ranking = judge(Scores(scores, 7, "d"))
    assert ranking.relevances == pytest.approx((0.75, 0.5, 0.0, 1.0))
    assert ranking.prompt_tokens == 7


def test_vectors_are_compared_with_the_first() -> None:
    """The query's; all of length 1."""
    made = Embeddings(((0.6, 0.8), (0.8, 0.6), (-0.6, -0.8)), 3, "d")
    assert measure(made).relevances == pytest.approx((0.96, -1.0))


def test_the_best_come_first() -> None:
    """Equal ones in their order; never more than there are."""
    ranking = Ranking((0.1, 0.9, 0.1, 0.5), 0)
    assert ranking.best(None) == ranking.best(9) == [1, 3, 0, 2]
    assert ranking.best(2) == [1, 3]


def test_fields_have_the_requests_names() -> None:
    """A query is the first of the texts that become vectors, and a field of a question."""
    scored = ["reranking.query", "reranking.instruction", "texts[2].continuations[0]", "texts", "x"]
    assert list(map(name_score, scored)) == ["query", "instruct", "documents[2]", "documents", "x"]
    embedded = ["texts[0]", "texts[3]", "texts", "x"]
    assert list(map(name_vector, embedded)) == ["query", "documents[2]", "documents", "x"]
