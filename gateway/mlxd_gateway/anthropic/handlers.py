"""Anthropic's endpoints: read, ask, write."""

from __future__ import annotations

from uuid import uuid4

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from mlxd import Completion, Model
from mlxd_gateway.anthropic import answers as a
from mlxd_gateway.anthropic import requests as r
from mlxd_gateway.anthropic.asks import ask_count, ask_message
from mlxd_gateway.common.bodies import reader_of
from mlxd_gateway.common.endpoints import client_of, generation_of, translate
from mlxd_gateway.common.failures import BadField
from mlxd_gateway.common.fetching import fetch_links
from mlxd_gateway.common.generation import under_any_name
from mlxd_gateway.common.responses import EVENT_STREAM, gather, json_response, stream

PAGE_DEFAULT, PAGE_MAX = 20, 1000
EPOCH = "1970-01-01T00:00:00Z"
"""When a model was released, where nobody knows."""
_read_message = reader_of(r.MessageRequest)
_read_count = reader_of(r.CountRequest)


async def create_message(request: Request) -> Response:
    """POST /v1/messages."""
    body = await _read_message(request)
    await fetch_links(request, body)
    generation = generation_of(request, await translate(request, ask_message, body))
    message_id = f"msg_{uuid4().hex}"
    if body.stream:
        writer = a.MessageWriter(message_id, body.model)
        return await stream(request, generation, writer, media_type=EVENT_STREAM, ping=a.ping)
    done = Completion.of(await gather(request, generation))
    return json_response(a.whole_message(message_id, body.model, done))


async def count_tokens(request: Request) -> Response:
    """POST /v1/messages/count_tokens."""
    body = await _read_count(request)
    await fetch_links(request, body)
    ask = await translate(request, ask_count, body)
    events = await gather(request, generation_of(request, ask))
    return json_response({"input_tokens": Completion.of(events).finished.usage.prompt_tokens})


def _entry(model: Model, name: str) -> a.Object:
    return {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": EPOCH,
        "lifecycle": "active",
        "max_input_tokens": model.context_length or model.context_length_max,
    }


async def list_models(request: Request) -> Response:
    """GET /v1/models: every name and alias, page by page."""
    query = request.query_params
    limit = query.get("limit", str(PAGE_DEFAULT))
    if not (limit.isascii() and limit.isdecimal() and 1 <= int(limit[:9]) <= PAGE_MAX):
        raise BadField("limit", f"a number from 1 to {PAGE_MAX}")
    models = await client_of(request).models()
    entries = [_entry(model, name) for model in models for name in (model.name, *model.aliases)]
    ids = [entry["id"] for entry in entries]
    begin, end = 0, len(entries)
    for field, known in (
        ("after_id", query.get("after_id")),
        ("before_id", query.get("before_id")),
    ):
        if known is not None and known not in ids:
            raise BadField(field, "is no model of the list")
    if "after_id" in query:
        begin = ids.index(query["after_id"]) + 1
    if "before_id" in query:
        end = ids.index(query["before_id"])
        begin = max(begin, end - int(limit))
    page = entries[begin:end][: int(limit)]
    more = begin > 0 if "before_id" in query else begin + len(page) < end
    names = [entry["id"] for entry in page]
    first, last = (names[0], names[-1]) if names else (None, None)
    return json_response({"data": page, "has_more": more, "first_id": first, "last_id": last})


async def show_model(request: Request) -> Response:
    """GET /v1/models/NAME."""
    name = request.path_params["name"]
    return json_response(_entry(await under_any_name(name, client_of(request).model), name))


ROUTES = (
    Route("/v1/messages", create_message, methods=["POST"]),
    Route("/v1/messages/count_tokens", count_tokens, methods=["POST"]),
)
