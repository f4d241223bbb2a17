"""Reranking over HTTP: what is asked of which model, answers of both clients, errors by name."""

from __future__ import annotations

from typing import Any

import pytest

from mlxd.v1 import inference_pb2, score_pb2, types_pb2
from mlxd_shared import config
from tests.fakes.mlxd_server import Answers, serving
from tests.fakes.replies import model
from tests.support.gateways import gateway_over

PATHS = ("/v1/rerank", "/v2/rerank")
BODY: dict[str, Any] = {"model": "demo", "query": "ab", "documents": ["a", {"text": "abc"}]}
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"documents": []}, "documents: "),
    ({"documents": ["a"] * (config.RERANK_DOCUMENTS_MAX + 1)}, "documents: "),
    ({"documents": [{"text": "a", "title": "b"}]}, "documents[0].title: is no field"),
    ({"documents": [{"title": "b"}]}, "documents[0]."),
    ({"top_n": 0}, "top_n: at least 1, not 0"),
    ({"rank_fields": ["title"]}, "rank_fields: a document is its text"),
    ({"query": None}, "query: "),
    ({"nothing": 1}, "nothing: is no field"),
]


def model_with(*, template: bool = False, pooling: bool = False) -> types_pb2.Model:
    """Return a model whose files have these."""
    known = model()
    known.has_chat_template, known.has_pooling = template, pooling
    return known


CHATTY, EMBEDDER = model_with(template=True), model_with(template=True, pooling=True)


@pytest.mark.asyncio
@pytest.mark.parametrize("path", PATHS)
async def test_a_reranker_is_asked_about_each_document(path: str) -> None:
    """Yes or no, with query and instruction; both clients find what they read."""
    async with serving(Answers(models=[CHATTY])) as fake, gateway_over(fake.address) as web:
        answer = (await web.post(path, {**BODY, "instruct": "i", "top_n": 1})).json()
        (request,) = [r for r in fake.requests if isinstance(r, score_pb2.ScoreRequest)]
        assert (request.reranking.query, request.reranking.instruction) == ("ab", "i")
        assert [(each.text, list(each.continuations)) for each in request.texts] == [
            ("a", ["yes", "no"]), ("abc", ["yes", "no"]),
        ]  # fmt: skip
        (best,) = answer["results"]
        assert (best["index"], best["relevance_score"]) == (0, pytest.approx(1 / (1 + 2.718281828)))
        assert set(best) == {"index", "relevance_score"}
        assert answer["meta"]["api_version"] == {"version": path[2]}
        assert answer["usage"]["total_tokens"] == answer["meta"]["tokens"]["input_tokens"]
        assert (answer["model"], answer["object"]) == ("demo", "list")


@pytest.mark.asyncio
async def test_a_pooling_compares_vectors() -> None:
    """The query's with each document's, best first, with their texts where they are wanted."""
    async with serving(Answers(models=[EMBEDDER])) as fake, gateway_over(fake.address) as web:
        answer = (await web.post(PATHS[1], {**BODY, "return_documents": True})).json()
        (request,) = [r for r in fake.requests if isinstance(r, inference_pb2.EmbedRequest)]
        assert (list(request.texts), request.normalize) == (["ab", "a", "abc"], True)
        assert answer["results"] == [
            {"index": 1, "relevance_score": 2 * 3 + 0.125**2, "document": {"text": "abc"}},
            {"index": 0, "relevance_score": 2 * 1 + 0.125**2, "document": {"text": "a"}},
        ]
        refused = await web.post(PATHS[1], {**BODY, "instruct": "i"})
        assert (refused.status_code, refused.json()["message"][:10]) == (400, "instruct: ")


@pytest.mark.asyncio
async def test_a_model_without_either_is_refused() -> None:
    """By its field, and without being loaded."""
    async with serving(Answers(models=[model()])) as fake, gateway_over(fake.address) as web:
        status, error = await web.error(PATHS[0], BODY)
        assert (status, error["message"][:7]) == (400, "model: ")
        assert not any(isinstance(r, score_pb2.ScoreRequest) for r in fake.requests)


@pytest.mark.asyncio
@pytest.mark.parametrize("path", PATHS)
async def test_what_is_wrong_has_the_fields_name(path: str) -> None:
    """In the shape of both APIs; nothing is asked of a model."""
    async with serving(Answers(models=[CHATTY])) as fake, gateway_over(fake.address) as web:
        for fields, begin in WRONG:
            status, error = await web.error(path, {**BODY, **fields})
            assert (status, set(error)) == (400, {"message", "detail"}), error
            assert error["message"] == error["detail"]
            assert error["message"].startswith(begin), error
        assert fake.requests == []
        assert (await web.post(path, {**BODY, "priority": 1})).status_code == (
            400 if path == PATHS[0] else 200
        )
