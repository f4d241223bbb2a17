"""OpenAI's endpoints: read, ask, write."""

from __future__ import annotations

import base64
from array import array
from collections.abc import Sequence
from uuid import uuid4

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from mlxd import Completion, Model
from mlxd_gateway.common.bodies import reader_of
from mlxd_gateway.common.endpoints import (
    client_of,
    embed_texts,
    generation_of,
    source_of,
    translate,
)
from mlxd_gateway.common.fetching import fetch_links
from mlxd_gateway.common.generation import under_any_name
from mlxd_gateway.common.responses import (
    EVENT_STREAM,
    gather,
    json_response,
    ping_by_comment,
    stream,
)
from mlxd_gateway.openai import answers as a
from mlxd_gateway.openai import requests as r
from mlxd_gateway.openai.asks import ask_chat, ask_completions, chooses, texts_of
from mlxd_gateway.openai.choosing import choose

_read_chat = reader_of(r.ChatRequest)
_read_completion = reader_of(r.CompletionRequest)
_read_embedding = reader_of(r.EmbeddingRequest)


async def complete_chat(request: Request) -> Response:
    """POST /v1/chat/completions."""
    body = await _read_chat(request)
    await fetch_links(request, body)
    generation = generation_of(request, await translate(request, ask_chat, body))
    head = a.Head(f"chatcmpl-{uuid4().hex}", body.model)
    if body.stream:
        writer = a.ChatWriter(head, usage=_wants_usage(body), choices=body.n or 1)
        return await stream(
            request, generation, writer, media_type=EVENT_STREAM, ping=ping_by_comment
        )
    return json_response(a.whole_chat(head, Completion.each_of(await gather(request, generation))))


async def complete_text(request: Request) -> Response:
    """POST /v1/completions."""
    body = await _read_completion(request)
    asks = ask_completions(body)
    source = source_of(request, asks)
    head = a.Head(f"cmpl-{uuid4().hex}", body.model)
    made = asks[0].n or 1
    if body.stream:
        choices = made * len(asks)
        writer = a.CompletionWriter(head, usage=_wants_usage(body), choices=choices)
        return await stream(request, source, writer, media_type=EVENT_STREAM, ping=ping_by_comment)
    completions = Completion.each_of(await gather(request, source))
    answers: Sequence[Completion] = completions
    if chooses(body):
        shows = body.logprobs is not None
        answers = choose(completions, made=made, kept=body.n or 1, shows_logprobs=shows)
    return json_response(a.whole_completion(head, answers, made=completions))


def _wants_usage(body: r.ChatRequest | r.CompletionRequest) -> bool:
    return body.stream_options is not None and bool(body.stream_options.include_usage)


async def embed(request: Request) -> Response:
    """POST /v1/embeddings."""
    body = await _read_embedding(request)
    texts = texts_of(body)
    made = await embed_texts(request, body.model, texts, dimensions=body.dimensions)
    write = _in_base64 if body.encoding_format == "base64" else list
    data = [
        {"object": "embedding", "index": index, "embedding": write(vector)}
        for index, vector in enumerate(made.vectors)
    ]
    usage = {"prompt_tokens": made.prompt_tokens, "total_tokens": made.prompt_tokens}
    return json_response({"object": "list", "data": data, "model": body.model, "usage": usage})


def _in_base64(vector: tuple[float, ...]) -> str:
    """Return floats of 32 bits, little-endian, as OpenAI's clients read them."""
    floats = array("f", vector)
    return base64.b64encode(floats.tobytes()).decode()


def list_entry(model: Model, name: str) -> a.Object:
    """Return one entry of the list of models."""
    return {"id": name, "object": "model", "created": 0, "owned_by": model.store or "mlxd"}


async def list_models(request: Request) -> Response:
    """GET /v1/models: every name and alias."""
    models = await client_of(request).models()
    data = [list_entry(model, name) for model in models for name in (model.name, *model.aliases)]
    return json_response({"object": "list", "data": data})


async def show_model(request: Request) -> Response:
    """GET /v1/models/NAME."""
    name = request.path_params["name"]
    model = await under_any_name(name, client_of(request).model)
    return json_response(list_entry(model, name))


ROUTES = (
    Route("/v1/chat/completions", complete_chat, methods=["POST"]),
    Route("/v1/completions", complete_text, methods=["POST"]),
    Route("/v1/embeddings", embed, methods=["POST"]),
)
