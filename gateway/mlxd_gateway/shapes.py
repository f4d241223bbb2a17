"""Whose API a request is of, and a failure in that API's shape."""

from __future__ import annotations

import enum
import math
from typing import Any

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Scope

from mlxd_gateway.anthropic.errors import error_body as anthropic_body
from mlxd_gateway.cohere.errors import error_body as cohere_body
from mlxd_gateway.common.failures import Failure, FailureKind
from mlxd_gateway.common.responses import json_response
from mlxd_gateway.ollama.errors import error_body as ollama_body
from mlxd_gateway.openai.errors import error_body as openai_body
from mlxd_gateway.page.errors import error_body as page_body
from mlxd_gateway.page.files import ROOT


class Api(enum.Enum):
    """The APIs."""

    OPENAI = "openai"
    ANTHROPIC = "anthropic"
    OLLAMA = "ollama"
    COHERE = "cohere"
    """And Jina's, which asks likewise."""
    PAGE = "page"
    """What the page is fed with."""


def api_of(scope: Scope) -> Api:
    """Return whose client has sent a request; OpenAI's and Anthropic's share /v1/models."""
    path: str = scope["path"]
    if path.startswith(ROOT):
        return Api.PAGE
    if path.startswith("/api/"):
        return Api.OLLAMA
    if path in ("/v1/rerank", "/v2/rerank"):
        return Api.COHERE
    is_anthropic = path.startswith("/v1/messages") or "anthropic-version" in Headers(scope=scope)
    return Api.ANTHROPIC if is_anthropic else Api.OPENAI


def render(failure: Failure, scope: Scope) -> Response:
    """Return a failure as the API's clients read it."""
    body: dict[str, Any]
    match api_of(scope):
        case Api.OPENAI:
            body = openai_body(failure)
        case Api.ANTHROPIC:
            body = anthropic_body(failure)
        case Api.OLLAMA:
            body = ollama_body(failure)
        case Api.COHERE:
            body = cohere_body(failure)
        case Api.PAGE:
            body = page_body(failure)
    response = json_response(body, failure.kind.value)
    if failure.retry_after_s is not None:
        response.headers["Retry-After"] = str(max(math.ceil(failure.retry_after_s), 1))
    if failure.kind is FailureKind.UNAUTHENTICATED:
        response.headers["WWW-Authenticate"] = "Bearer"
    return response
