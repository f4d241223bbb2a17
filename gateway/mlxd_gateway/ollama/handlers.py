"""Ollama's endpoints: read, ask, write."""

from __future__ import annotations

import time

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from mlxd import Client, Completion, LoadSpec, Model, ModelState, __version__
from mlxd_gateway.common.asks import Ask
from mlxd_gateway.common.bodies import reader_of
from mlxd_gateway.common.endpoints import (
    client_of,
    clients_of,
    embed_texts,
    generation_of,
    translate,
)
from mlxd_gateway.common.failures import BadField
from mlxd_gateway.common.generation import under_any_name
from mlxd_gateway.common.responses import LINES, gather, json_response, stream, while_there
from mlxd_gateway.ollama import answers as a
from mlxd_gateway.ollama import requests as r
from mlxd_gateway.ollama.asks import ask_chat, ask_generate, keep_alive_s
from mlxd_gateway.ollama.pulls import Pull, name_on_hub, response_of
from mlxd_shared import config

_read_chat = reader_of(r.ChatRequest)
_read_generate = reader_of(r.GenerateRequest)
_read_embed = reader_of(r.EmbedRequest)
_read_old_embed = reader_of(r.OldEmbedRequest)
_read_show = reader_of(r.ShowRequest)
_read_pull = reader_of(r.PullRequest)


async def chat(request: Request) -> Response:
    """POST /api/chat; without messages its model is loaded, or unloaded."""
    body = await _read_chat(request)
    lines = a.Lines(body.model, chat=True)
    if not body.messages:
        return await _load(request, body, lines)
    ask = await translate(request, ask_chat, body)
    return await _answer(request, ask, lines, streams=body.stream is not False)


async def generate(request: Request) -> Response:
    """POST /api/generate; without a prompt its model is loaded, or unloaded."""
    body = await _read_generate(request)
    lines = a.Lines(body.model, chat=False)
    if not body.prompt:
        return await _load(request, body, lines)
    ask = await translate(request, ask_generate, body)
    return await _answer(request, ask, lines, streams=body.stream is not False)


async def _answer(request: Request, ask: Ask, lines: a.Lines, *, streams: bool) -> Response:
    generation = generation_of(request, ask)
    if streams:
        return await stream(request, generation, lines, media_type=LINES, ping=None)
    return json_response(lines.whole(Completion.of(await gather(request, generation))))


async def _load(
    request: Request, body: r.ChatRequest | r.GenerateRequest, lines: a.Lines
) -> Response:
    """Load the model, or unload it where it is to stay for no time."""
    stays_s = keep_alive_s(body.keep_alive)
    async with clients_of(request).lend() as client:  # it takes as long as it takes

        async def load(name: str) -> None:
            async with client.load(name, options=LoadSpec(keep_alive_s=stays_s)) as updates:
                async for _ in updates:
                    pass

        if stays_s == 0:
            await while_there(request, under_any_name(body.model, client.unload))
            return json_response(lines.empty("unload"))
        await while_there(request, under_any_name(body.model, load))
        return json_response(lines.empty("load"))


async def embed(request: Request) -> Response:
    """POST /api/embed."""
    body = await _read_embed(request)
    begun_s = time.monotonic()
    made = await embed_texts(request, body.model, body.input, dimensions=body.dimensions)
    return json_response(
        {
            "model": body.model,
            "embeddings": made.vectors,
            "total_duration": round((time.monotonic() - begun_s) * 1e9),
            "load_duration": 0,
            "prompt_eval_count": made.prompt_tokens,
        }
    )


async def embed_one(request: Request) -> Response:
    """POST /api/embeddings, the older form: one text, one vector."""
    body = await _read_old_embed(request)
    made = await embed_texts(request, body.model, body.prompt, field="prompt")
    return json_response({"embedding": made.vectors[0]})


async def list_tags(request: Request) -> Response:
    """GET /api/tags: every name and alias."""
    models = await client_of(request).models()
    tags = [a.tag_of(model, name) for model in models for name in (model.name, *model.aliases)]
    return json_response({"models": tags})


async def list_loaded(request: Request) -> Response:
    """GET /api/ps: the models in memory."""
    models = await client_of(request).models()
    loaded = (ModelState.READY, ModelState.DRAINING)
    return json_response(
        {"models": [a.process_of(model) for model in models if model.state in loaded]}
    )


async def show(request: Request) -> Response:
    """POST /api/show."""
    body = await _read_show(request)
    name = body.model or body.name
    if not name:
        raise BadField("model", "is needed")
    return json_response(a.show_model(await _find(client_of(request), name)))


async def _find(client: Client, name: str) -> Model:
    return await under_any_name(name, client.model)


async def pull(request: Request) -> Response:
    """POST /api/pull: the server downloads a model into its own cache."""
    body = await _read_pull(request)
    name = name_on_hub(body.model or body.name)
    if not name:
        raise BadField("model", "is needed")
    pulling = Pull(clients_of(request), request.app.state.leaving)
    try:
        await while_there(request, pulling.begin(name, config.HTTP_FIRST_S))
        if body.stream is not False:
            return response_of(pulling)
        await while_there(request, _wait_for(pulling))
    except BaseException:
        await pulling.aclose()
        raise
    await pulling.aclose()
    return json_response({"status": "success"})


async def _wait_for(pulling: Pull) -> None:
    async for _ in pulling.steps():
        pass


async def show_version(_: Request) -> Response:
    """GET /api/version: mlxd's own."""
    return json_response({"version": __version__})


ROUTES = (
    Route("/api/chat", chat, methods=["POST"]),
    Route("/api/generate", generate, methods=["POST"]),
    Route("/api/embed", embed, methods=["POST"]),
    Route("/api/embeddings", embed_one, methods=["POST"]),
    Route("/api/show", show, methods=["POST"]),
    Route("/api/pull", pull, methods=["POST"]),
    Route("/api/tags", list_tags),
    Route("/api/ps", list_loaded),
    Route("/api/version", show_version),
)
