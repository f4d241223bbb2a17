"""The endpoints of the page: read, ask, show."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from mlxd import Client, LoadSpec, LoadUpdate, LogLines, Model, Status, Stream, __version__
from mlxd_gateway.common.bodies import query_reader_of, reader_of
from mlxd_gateway.common.callers import Callers
from mlxd_gateway.common.endpoints import client_of, clients_of, owner_of
from mlxd_gateway.common.responses import json_response, write_event
from mlxd_gateway.page import requests as r
from mlxd_gateway.page.events import StreamCount, answer_once, stream_events
from mlxd_gateway.page.files import FILES, send_file
from mlxd_gateway.page.rights import find_rights
from mlxd_gateway.page.views import SessionView, view_log, view_model, view_status

_read_fit = reader_of(r.FitRequest)
_read_load = reader_of(r.LoadRequest)
_read_unload = reader_of(r.UnloadRequest)
_read_watch = query_reader_of(r.WatchQuery)
_read_logs = query_reader_of(r.LogsQuery)
_Moment = tuple[Status, tuple[Model, ...]]
_T = TypeVar("_T")


async def show_session(request: Request) -> Response:
    """GET /page/api/session: what the caller may do."""
    rights = await find_rights(client_of(request))
    return json_response(SessionView(__version__, rights))


async def list_models(request: Request) -> Response:
    """GET /page/api/models: every model."""
    models = await client_of(request).models()
    return json_response([view_model(model) for model in models])


async def watch(request: Request) -> Response:
    """GET /page/api/watch: an event `status` at every interval, `models` when they have changed."""
    query = _read_watch(request)
    held, statuses = await _open(
        request, lambda client: client.watch_status(interval_s=query.interval_s)
    )

    async def look() -> AsyncIterator[_Moment]:
        async for status in statuses:
            yield status, await client_of(request).models()

    sent = b""

    def write(moment: _Moment) -> bytes:
        nonlocal sent
        status, models = moment
        listed = write_event([view_model(model) for model in models], "models")
        is_new, sent = listed != sent, listed
        return (listed if is_new else b"") + write_event(view_status(status), "status")

    return await stream_events(request, held, look(), write)


async def load(request: Request) -> Response:
    """POST /page/api/load: an event `model` for each step; the last one is ready."""
    body = await _read_load(request)
    held, updates = await _open(
        request, lambda client: client.load(body.model, options=_spec_of(body))
    )

    def write(update: LoadUpdate) -> bytes:
        return write_event(view_model(update.model), "model")

    return await stream_events(request, held, updates, write)


async def fit(request: Request) -> Response:
    """POST /page/api/fit: whether and how a model would fit; nothing is loaded."""
    body = await _read_fit(request)
    asking = client_of(request).fit(body.model, options=_spec_of(body))
    return json_response(await answer_once(request, asking))


async def unload(request: Request) -> Response:
    """POST /page/api/unload: answers when it is done."""
    body = await _read_unload(request)
    async with clients_of(request).lend() as client:
        unloading = client.unload(body.model, grace_s=body.grace_s, force=body.force)
        done = await answer_once(request, unloading)
    return json_response({"model": view_model(done.model), "streams_aborted": done.streams_aborted})


async def follow_logs(request: Request) -> Response:
    """GET /page/api/logs: an event `lines` for what a worker wrote, and then for what it writes."""
    query = _read_logs(request)
    held, lines = await _open(
        request, lambda client: client.read_logs(query.model, tail=query.tail, follow=True)
    )

    def write(some: LogLines) -> bytes:
        return write_event(view_log(some), "lines")

    return await stream_events(request, held, lines, write)


async def _open(
    request: Request, begin: Callable[[Client], Stream[_T]]
) -> tuple[AsyncExitStack, Stream[_T]]:
    """Return a stream on a connection for it, and what ends both; nothing is held if it fails."""
    callers: Callers = request.app.state.callers
    await callers.check()
    count: StreamCount = request.app.state.page_streams
    async with AsyncExitStack() as held:
        held.enter_context(count.hold(owner_of(request)))
        client = await held.enter_async_context(clients_of(request).lend())
        items = await held.enter_async_context(begin(client))
        return held.pop_all(), items


def _spec_of(body: r.FitRequest | r.LoadRequest) -> LoadSpec:
    return LoadSpec(
        context_length=body.context_length,
        rows_max=body.rows_max,
        weights=body.weights,
        kv_format=body.kv_format,
        pinned=body.pinned if isinstance(body, r.LoadRequest) else None,
    )


def _route_stream(path: str, endpoint: Callable[[Request], Awaitable[Response]]) -> Route:
    """Return a route without HEAD: its answer would go on, unseen, and notice no client's end."""
    route = Route(path, endpoint)
    route.methods = {"GET"}
    return route


ROUTES = (
    *(Route(path, send_file) for path in FILES),
    Route("/page/api/session", show_session),
    Route("/page/api/models", list_models),
    _route_stream("/page/api/watch", watch),
    _route_stream("/page/api/logs", follow_logs),
    Route("/page/api/load", load, methods=["POST"]),
    Route("/page/api/fit", fit, methods=["POST"]),
    Route("/page/api/unload", unload, methods=["POST"]),
)
