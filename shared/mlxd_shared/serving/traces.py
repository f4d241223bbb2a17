"""One span a call, of all four kinds of method, for servers that are traced.

Invariants:
- Calls that ask for health or status, of others' services, and of methods that there are not have
  none: no span has a name that a client made up.
- The span is the current one in the call's own task, and ends as the call does.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, contextmanager
from typing import Any

import grpc

from mlxd_shared.ops.tracing import Span, Tracer, current_span
from mlxd_shared.security.callers import OWN_PREFIX
from mlxd_shared.wire.interceptors import Context, Continuation, Handler, is_inquiry, rewrap

_LEFT = grpc.StatusCode.CANCELLED


class TraceInterceptor(grpc.aio.ServerInterceptor):
    """Traces calls. To stand behind what lets callers in, and before everything else."""

    def __init__(self, tracer: Tracer) -> None:
        """Begin spans by `tracer`."""
        self._tracer = tracer

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Handler | None:
        """Begin a span, and have the handler end it."""
        method = handler_call_details.method
        handler = await continuation(handler_call_details)
        if handler is None or is_inquiry(method) or not method.startswith(OWN_PREFIX):
            return handler
        service, _, name = method[1:].rpartition("/")
        span = self._tracer.begin(method[1:], handler_call_details.invocation_metadata or ())
        span.note({"rpc.system": "grpc", "rpc.service": service, "rpc.method": name})
        current_span.set(span)  # each call has a task of its own
        return _wrap(handler, span)


def _wrap(handler: Any, span: Span) -> Handler:  # noqa: ANN401 - gRPC's are untyped
    follow = _follow_stream if handler.response_streaming else _follow_unary
    return rewrap(
        handler,
        lambda behaviour: follow(behaviour, span),
        request_deserializer=handler.request_deserializer,
    )


@contextmanager
def _ending(span: Span, context: Context) -> Iterator[None]:
    """End the span with the call's status, however the body ends."""
    left = True
    try:
        yield
        left = False
    except grpc.aio.AbortError:
        left = False
        raise
    finally:
        _end(span, context, left=left)


def _follow_unary(behaviour: Any, span: Span) -> Any:  # noqa: ANN401
    async def follow(request: Any, context: Context) -> Any:  # noqa: ANN401
        with _ending(span, context):
            return await behaviour(request, context)

    return follow


def _follow_stream(behaviour: Any, span: Span) -> Any:  # noqa: ANN401
    async def follow(request: Any, context: Context) -> AsyncIterator[Any]:  # noqa: ANN401
        with _ending(span, context):
            async with aclosing(behaviour(request, context)) as messages:
                async for message in messages:
                    yield message

    return follow


def _end(span: Span, context: Context, *, left: bool) -> None:
    """End a call's span with the call's status; left: the client has gone."""
    set_code: Any = context.code()  # a StatusCode, whatever the stubs say; None: the call was good
    code = _LEFT if left else set_code or grpc.StatusCode.OK
    span.note({"rpc.grpc.status_code": code.value[0]})
    span.end(problem="" if code is grpc.StatusCode.OK else code.name)
