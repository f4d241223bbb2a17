"""What every request passes: its id, its span, who may come in, how many at once, and bugs.

Invariants:
- Every answer carries X-Request-Id, the client's own where that is a short printable text.
- What the door refuses reaches no handler. Refusals have the API's own shape, and pages of origins
  that are let in may read them.
- An exception of ours is in the log under the request's id; the client is told the id alone.
- Calls to the controller carry the request's span; where nothing is traced, the client's own.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from http import HTTPStatus
from uuid import uuid4

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mlxd import call_headers
from mlxd_gateway.common.endpoints import OWNER, REQUEST_ID
from mlxd_gateway.common.failures import Failure, FailureKind
from mlxd_gateway.door import Door
from mlxd_gateway.shapes import render
from mlxd_shared import config
from mlxd_shared.ops.logs import get_logger
from mlxd_shared.ops.tracing import Span, Tracer
from mlxd_shared.security.bearer import Refusals

_ID = re.compile(rf"[!-~]{{1,{config.REQUEST_ID_CHARS_MAX}}}")
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}(-[!-~]{0,200})?")
_TRACESTATE = re.compile(r"[ -~]{1,512}")
_METHODS = frozenset({"DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT"})
_OTHER = "_OTHER"
"""What OpenTelemetry calls a method that is none of HTTP's: a client may make up a long one."""
_log = get_logger("gateway")


class Edge:
    """ASGI middleware around everything."""

    def __init__(
        self,
        app: ASGIApp,
        door: Door,
        *,
        share: Callable[[ASGIApp], ASGIApp] = lambda app: app,
        requests_max: int = config.HTTP_REQUESTS_MAX,
        tracer: Tracer | None = None,
    ) -> None:
        """Let in whom `door` does, and `requests_max` requests at once.

        share: makes what an application answers readable for pages of other origins; refusals too.
        tracer: traces those that are let in; None: nothing does.
        """
        self._app = share(app)
        self._share = share
        self._door = door
        self._requests_max = requests_max
        self._tracer = tracer
        self._under_way = 0
        self._refusals = Refusals()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        sent_id = headers.get("x-request-id", "")
        request_id = sent_id if _ID.fullmatch(sent_id) else uuid4().hex
        scope[REQUEST_ID] = request_id
        scope[OWNER] = self._door.owner_of(headers)
        self._under_way += 1
        try:
            await self._follow(scope, receive, _Sender(send, request_id), headers)
        finally:
            self._under_way -= 1

    async def _follow(
        self, scope: Scope, receive: Receive, send: _Sender, headers: Headers
    ) -> None:
        """Answer a request in its trace."""
        failure = self._refuse(scope, headers)
        trace = _trace(headers)
        span = None
        if self._tracer is not None and failure is None:
            span = self._tracer.begin(_method(scope), trace)
            trace = span.headers
        marked = call_headers.set((*trace, *self._door.pass_on(headers)))
        try:
            await self._answer(scope, receive, send, failure)
        finally:
            call_headers.reset(marked)
            if span is not None:
                _end(span, scope, send)

    async def _answer(
        self, scope: Scope, receive: Receive, send: _Sender, failure: Failure | None
    ) -> None:
        begun_s = time.monotonic()
        try:
            if failure is not None:
                await self._share(render(failure, scope))(scope, receive, send)
            else:
                await self._app(scope, receive, send)
        except Exception as error:  # noqa: BLE001 - a bug in one request ends no other
            _log.error("a request failed", request_id=send.request_id, exc_info=error)
        finally:
            seconds = round(time.monotonic() - begun_s, 4)
            _log.info(
                "request",
                method=scope["method"],
                path=scope["path"],
                status=send.status,
                seconds=seconds,
                request_id=send.request_id,
            )

    def _refuse(self, scope: Scope, headers: Headers) -> Failure | None:
        if self._under_way > self._requests_max:
            message = f"{self._requests_max} requests are under way"
            return Failure(FailureKind.BUSY, message, retry_after_s=config.HTTP_RETRY_S)
        failure = self._door.refuse(scope, headers)
        if failure is not None and failure.kind is FailureKind.UNAUTHENTICATED:
            self._refusals.note(str(scope.get("client")))
        return failure


class _Sender:
    """Sends an answer, with the request's id in its head; knows the status once it is sent."""

    def __init__(self, send: Send, request_id: str) -> None:
        self._send = send
        self.request_id = request_id
        self.status = 0
        """0: none was sent."""

    async def __call__(self, message: Message) -> None:
        """Send one message of ASGI."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            MutableHeaders(scope=message)["x-request-id"] = self.request_id
        await self._send(message)


def _end(span: Span, scope: Scope, sender: _Sender) -> None:
    """End a request's span with the status of its answer; 0: its client has gone before.

    Its name has the path where that is an endpoint's whole, never what a client makes up.
    """
    if "endpoint" in scope and not scope.get("path_params"):
        span.rename(f"{_method(scope)} {scope['path']}")
    span.note(
        {
            "http.request.method": _method(scope),
            "url.path": scope["path"][: config.REQUEST_ID_CHARS_MAX],
            "http.response.status_code": sender.status,
            "mlxd.request_id": sender.request_id,
        }
    )
    failed = sender.status == 0 or sender.status >= HTTPStatus.INTERNAL_SERVER_ERROR
    span.end(problem=f"status {sender.status}" if failed else "")


def _method(scope: Scope) -> str:
    """Return a request's method as its trace has it."""
    method: str = scope["method"]
    return method if method in _METHODS else _OTHER


def _trace(headers: Headers) -> tuple[tuple[str, str], ...]:
    """Return what W3C's Trace Context says of a request; nothing where it says it wrongly."""
    parent, state = headers.get("traceparent", ""), headers.get("tracestate", "")
    if not _TRACEPARENT.fullmatch(parent):
        return ()
    own = (("traceparent", parent),)
    return (*own, ("tracestate", state)) if _TRACESTATE.fullmatch(state) else own
