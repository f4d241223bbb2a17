"""The endpoints of OpenAI's Responses API: read, ask, write, and keep."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable
from uuid import uuid4

import msgspec
from msgspec import Raw
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from mlxd import InvalidRequest, ModelNotFound
from mlxd_gateway.common.bodies import query_reader_of, reader_of
from mlxd_gateway.common.endpoints import client_of, generation_of, owner_of, translate
from mlxd_gateway.common.failures import BadField, Failure, FailureKind, Refused
from mlxd_gateway.common.fetching import fetch_links
from mlxd_gateway.common.responses import (
    EVENT_STREAM,
    gather,
    json_response,
    ping_by_comment,
    stream,
)
from mlxd_gateway.openai.responses import requests as r
from mlxd_gateway.openai.responses.answers import Keep, ResponseWriter
from mlxd_gateway.openai.responses.asks import PREVIOUS, ask_response
from mlxd_gateway.openai.responses.heads import Head, head_of
from mlxd_gateway.openai.responses.inputs import add_types, read_items, read_output, write_input
from mlxd_gateway.openai.responses.outputs import Object
from mlxd_gateway.openai.responses.store import Kept, ResponseStore
from mlxd_shared import config

LIMIT_DEFAULT, LIMIT_MAX = 20, 100
_read_request = reader_of(r.ResponseRequest, prepare=add_types)
_read_retrieve = query_reader_of(r.RetrieveQuery)
_read_input_items = query_reader_of(r.InputItemsQuery)
_encode = msgspec.json.encode


class _Named(msgspec.Struct):
    """An item that is kept, as far as it must be known to find it."""

    id: str


_raw_list = msgspec.json.Decoder(list[Raw])
_named = msgspec.json.Decoder(_Named)


def store_of(request: Request) -> ResponseStore:
    """Return the application's one store of responses."""
    store: ResponseStore = request.app.state.responses
    return store


async def create_response(request: Request) -> Response:
    """POST /v1/responses."""
    body = await _read_request(request)
    await fetch_links(request, body)
    head = head_of(body, uuid4().hex, int(time.time()))
    kept = _kept_before(request, body.previous_response_id)
    history = [
        item for each in kept for item in (*read_items(each.input), *read_output(each.response))
    ]
    ask = functools.partial(ask_response, history=history)
    kept_nbytes = sum(each.nbytes for each in kept)
    whole = await translate(request, ask, body, kept_nbytes=kept_nbytes)
    generation = generation_of(request, whole)
    writer = ResponseWriter(head, _keeper(request, body, head))
    if body.stream:
        return await stream(
            request, generation, writer, media_type=EVENT_STREAM, ping=ping_by_comment
        )
    return json_response(writer.whole(await gather(request, generation)))


def _kept_before(request: Request, previous_id: str | None) -> list[Kept]:
    """Return the response that a request goes on from behind those before it.

    Raises:
        Refused: it is not there, or one before it is not.
        BadField: they are too large together.
    """
    if previous_id is None:
        return []
    store = store_of(request)
    last = store.get(previous_id, owner_of(request), time.monotonic())
    chain = [last, *(store.before(last) if last is not None else ())]
    kept = [each for each in reversed(chain) if each is not None]
    if len(kept) < len(chain):
        what = "it is not kept" if last is None else "one before it was deleted"
        raise Refused(Failure(FailureKind.NOT_FOUND, f"{PREVIOUS}: {what}", PREVIOUS))
    if sum(each.nbytes for each in kept) > config.HTTP_BODY_BYTES_MAX:
        limit = config.HTTP_BODY_BYTES_MAX
        raise BadField(PREVIOUS, f"what it goes on from has at most {limit} bytes in all")
    return kept


def _keeper(request: Request, body: r.ResponseRequest, head: Head) -> Keep:
    """Return what keeps a request's response, where it is to be kept."""
    if body.store is False:
        return lambda _: None
    make = functools.partial(
        Kept,
        head.id,
        owner_of(request),
        body.model,
        write_input(body.input, head.unique),
        previous_id=body.previous_response_id or "",
    )
    return functools.partial(_keep, store_of(request), make)


def _keep(store: ResponseStore, make: Callable[[bytes], Kept], response: Object) -> None:
    store.put(make(_encode(response)), time.monotonic())


async def _find(request: Request) -> Kept:
    """Return the response that a request's path names.

    Raises:
        Refused: there is none for this key.
        MlxdError: the controller does not know the key any more.
    """
    response_id: str = request.path_params["id"]
    kept = store_of(request).get(response_id, owner_of(request), time.monotonic())
    if kept is None:
        message = f"there is no response {response_id[:100]!r}"
        raise Refused(Failure(FailureKind.NOT_FOUND, message, "response_id"))
    if kept.owner:
        with contextlib.suppress(InvalidRequest, ModelNotFound):  # it judges keys alone
            await client_of(request).model(kept.model)
    return kept


async def retrieve_response(request: Request) -> Response:
    """GET /v1/responses/ID."""
    _read_retrieve(request)
    return Response((await _find(request)).response, media_type="application/json")


async def delete_response(request: Request) -> Response:
    """DELETE /v1/responses/ID."""
    kept = await _find(request)
    store_of(request).delete(kept.id, kept.owner)
    return json_response({"id": kept.id, "object": "response", "deleted": True})


async def cancel_response(_: Request) -> Response:
    """POST /v1/responses/ID/cancel."""
    raise BadField("background", f"{r.NO_BACKGROUND}: to cancel a response, leave it")


async def list_input_items(request: Request) -> Response:
    """GET /v1/responses/ID/input_items: what the request itself has sent, page by page."""
    query = _read_input_items(request)
    kept = await _find(request)
    return json_response(page_of(_raw_list.decode(kept.input), query))


def page_of(items: list[Raw], query: r.InputItemsQuery) -> Object:
    """Return the page of a list of items that a query asks for.

    Raises:
        BadField: the limit is none, or `after` is no item of the list.
    """
    limit = LIMIT_DEFAULT if query.limit is None else query.limit
    if not 1 <= limit <= LIMIT_MAX:
        raise BadField("limit", f"a number from 1 to {LIMIT_MAX}")
    ordered = items if query.order == "asc" else items[::-1]
    ids = [_named.decode(item).id for item in ordered]
    if query.after is not None and query.after not in ids:
        raise BadField("after", "is no item of the list")
    begin = 0 if query.after is None else ids.index(query.after) + 1
    page, names = ordered[begin : begin + limit], ids[begin : begin + limit]
    return {
        "object": "list",
        "data": page,
        "first_id": names[0] if names else None,
        "last_id": names[-1] if names else None,
        "has_more": begin + limit < len(ids),
    }


ROUTES = (
    Route("/v1/responses", create_response, methods=["POST"]),
    Route("/v1/responses/{id}", retrieve_response, methods=["GET"]),
    Route("/v1/responses/{id}", delete_response, methods=["DELETE"]),
    Route("/v1/responses/{id}/cancel", cancel_response, methods=["POST"]),
    Route("/v1/responses/{id}/input_items", list_input_items, methods=["GET"]),
)
