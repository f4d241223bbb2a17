"""The endpoints of reranking: read, ask, write."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from mlxd import MlxdError, Reranking
from mlxd_gateway.cohere import requests as r
from mlxd_gateway.cohere.ranking import Ranking, rank
from mlxd_gateway.common.bodies import reader_of
from mlxd_gateway.common.endpoints import clients_of
from mlxd_gateway.common.failures import BadField, Refused, failure_of
from mlxd_gateway.common.generation import under_any_name
from mlxd_gateway.common.responses import json_response, while_there

_read_request = reader_of(r.RerankRequest)
_read_new_request = reader_of(r.NewRerankRequest)
_Body = r.RerankRequest | r.NewRerankRequest


async def rerank(request: Request) -> Response:
    """POST /v1/rerank."""
    return await _answer(request, await _read_request(request), version="1")


async def rerank_v2(request: Request) -> Response:
    """POST /v2/rerank."""
    return await _answer(request, await _read_new_request(request), version="2")


async def _answer(request: Request, body: _Body, *, version: str) -> Response:
    if body.top_n is not None and body.top_n < 1:
        raise BadField("top_n", f"at least 1, not {body.top_n}")
    texts = [each if isinstance(each, str) else each.text for each in body.documents]
    reranking = Reranking(body.query, body.instruct or "")

    async def rank_all() -> Ranking:
        async with clients_of(request).lend() as client:
            return await under_any_name(
                body.model, lambda name: rank(client, name, reranking, texts)
            )

    try:
        ranking = await while_there(request, rank_all())
    except MlxdError as error:
        raise Refused(failure_of(error)) from error
    return json_response(write(body, ranking, texts, version=version))


def write(body: _Body, ranking: Ranking, texts: list[str], *, version: str) -> dict[str, Any]:
    """Return the answer, with what Cohere's clients read and what Jina's do."""
    results = []
    for index in ranking.best(body.top_n):
        result: dict[str, Any] = {"index": index, "relevance_score": ranking.relevances[index]}
        if body.return_documents:
            result["document"] = {"text": texts[index]}
        results.append(result)
    tokens = ranking.prompt_tokens
    return {
        "id": str(uuid4()),
        "object": "list",
        "model": body.model,
        "results": results,
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        "meta": {
            "api_version": {"version": version},
            "tokens": {"input_tokens": tokens, "output_tokens": 0},
        },
    }


ROUTES = (
    Route("/v1/rerank", rerank, methods=["POST"]),
    Route("/v2/rerank", rerank_v2, methods=["POST"]),
)
