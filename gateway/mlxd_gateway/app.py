"""The application: every endpoint of every API, and what becomes of errors."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from http import HTTPStatus

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from mlxd import MlxdError, RemoteError
from mlxd_gateway.anthropic import handlers as anthropic
from mlxd_gateway.cohere import handlers as cohere
from mlxd_gateway.common.bodies import Room
from mlxd_gateway.common.callers import Callers
from mlxd_gateway.common.clients import Clients
from mlxd_gateway.common.endpoints import REQUEST_ID, client_of
from mlxd_gateway.common.failures import Failure, FailureKind, Refused, failure_of
from mlxd_gateway.common.fetching import Fetcher
from mlxd_gateway.common.responses import json_response
from mlxd_gateway.door import Door
from mlxd_gateway.edge import Edge
from mlxd_gateway.ollama import handlers as ollama
from mlxd_gateway.openai import handlers as openai
from mlxd_gateway.openai.responses import handlers as responses
from mlxd_gateway.openai.responses.store import ResponseStore
from mlxd_gateway.page import handlers as page
from mlxd_gateway.page.events import StreamCount
from mlxd_gateway.page.files import ROOT as PAGE
from mlxd_gateway.shapes import Api, api_of, render
from mlxd_shared import config
from mlxd_shared.ops.tracing import Tracer

CLIENT_GONE = 499
Handler = Callable[[Request], Awaitable[Response]]


def make_app(
    clients: Clients,
    door: Door,
    *,
    bodies_nbytes_max: int = config.REQUESTS_HELD_BYTES_MAX,
    agent_rules: bool = True,
    fetcher: Fetcher | None = None,
    leaving: asyncio.Event | None = None,
    tracer: Tracer | None = None,
) -> ASGIApp:
    """Return the application over connections that are open for as long as it serves.

    door: who may come in; browsers are told of its origins (CORS). bodies_nbytes_max: of all bodies
    that are being read. agent_rules: whether chats are changed by `agents.rules`. fetcher: fetches
    images at addresses; None: none is fetched. leaving: is set when the gateway takes no requests
    any more; streams that have no end of their own end then. tracer: None: nothing is traced.
    """
    app = Starlette(
        routes=[
            Route("/", show_root),
            Route("/health", check_health),
            *openai.ROUTES,
            *responses.ROUTES,
            *anthropic.ROUTES,
            *ollama.ROUTES,
            *cohere.ROUTES,
            *page.ROUTES,
            Route("/v1/models", _by_api(openai.list_models, anthropic.list_models)),
            Route("/v1/models/{name:path}", _by_api(openai.show_model, anthropic.show_model)),
        ],
        exception_handlers={
            Refused: _refuse,
            MlxdError: _tell,
            HTTPException: _tell_status,
            ClientDisconnect: _note_gone,
            Exception: _tell_bug,
        },
    )
    app.state.clients = clients
    app.state.callers = Callers(clients.shared)
    app.state.room = Room(bodies_nbytes_max)
    app.state.responses = ResponseStore()
    app.state.agent_rules = agent_rules
    app.state.fetcher = fetcher
    app.state.page_streams = StreamCount()
    app.state.leaving = leaving or asyncio.Event()
    return Edge(app, door, share=_sharer(door.origins), tracer=tracer)


def _sharer(origins: tuple[str, ...]) -> Callable[[ASGIApp], ASGIApp]:
    """Return what lets pages of these origins read answers."""
    if not origins:
        return lambda app: app
    return partial(
        CORSMiddleware,
        allow_origins=origins,
        allow_methods=["GET", "POST", "DELETE"],
        allow_headers=["*"],
        expose_headers=["x-request-id", "retry-after"],
    )


def _by_api(openai_handler: Handler, anthropic_handler: Handler) -> Handler:
    """Return a handler of a path that two APIs share."""

    async def choose(request: Request) -> Response:
        if not request.path_params.get("name", "any"):
            raise HTTPException(HTTPStatus.NOT_FOUND)
        is_anthropic = api_of(request.scope) is Api.ANTHROPIC
        return await (anthropic_handler if is_anthropic else openai_handler)(request)

    return choose


async def show_root(request: Request) -> Response:
    """GET /: what this is, as clients of Ollama's API look for; browsers are sent to the page."""
    if "text/html" in request.headers.get("accept", ""):
        return RedirectResponse(PAGE, headers={"Vary": "Accept"})
    return PlainTextResponse("mlxd is running", headers={"Vary": "Accept"})


async def check_health(request: Request) -> Response:
    """GET /health: whether the controller serves."""
    try:
        healthy = await client_of(request).healthy()
    except RemoteError as error:
        healthy = error.code.name == "UNAUTHENTICATED"  # it answers; this request has no key
    except MlxdError:
        healthy = False
    status = HTTPStatus.OK if healthy else HTTPStatus.SERVICE_UNAVAILABLE
    return json_response({"status": "ok" if healthy else "no controller answers"}, status)


async def _refuse(request: Request, error: Exception) -> Response:
    assert isinstance(error, Refused)
    return render(error.failure, request.scope)


async def _tell(request: Request, error: Exception) -> Response:
    assert isinstance(error, MlxdError)
    return render(failure_of(error), request.scope)


async def _note_gone(_: Request, __: Exception) -> Response:
    """Answer nobody, under the status that proxies use for it."""
    return Response(status_code=CLIENT_GONE)


async def _tell_bug(request: Request, _: Exception) -> Response:
    """Name the id under which the log has the cause."""
    error_id = request.scope[REQUEST_ID]
    return render(Failure(FailureKind.BUG, f"internal error {error_id}"), request.scope)


async def _tell_status(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = request.scope["path"]
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        failure = Failure(FailureKind.METHOD, f"{request.method} is not for {path}")
    else:
        failure = Failure(FailureKind.NOT_FOUND, f"there is no {path}")
    response = render(failure, request.scope)
    response.headers.update(error.headers or {})
    return response
