"""One server interceptor: requests come in by `intake`, every exception becomes a status.

MlxdError travels as `status.to_status` says. Anything else is a bug: the log gets the traceback
under an error id, the client gets INTERNAL with that id; nothing leaks. Requests reach the guard as
bytes: gRPC would parse them unseen on the event loop, and call a failure to do so UNKNOWN.
CancelledError is re-raised untouched: swallowing it leaks the call's objects in grpc.aio.
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, aclosing, nullcontext
from functools import partial
from typing import Any, NoReturn, TypeAlias

import grpc
from google.protobuf.message import Message
from grpc_status import rpc_status

from mlxd_shared import config
from mlxd_shared.domain.errors import InternalError, MlxdError
from mlxd_shared.ops.logs import get_logger
from mlxd_shared.wire.intake import Intake, Reader
from mlxd_shared.wire.proof import Proof
from mlxd_shared.wire.status import RemoteError, shorten, to_status
from mlxd_shared.wire.wire_scan import Limits, Size

Context = grpc.aio.ServicerContext[Any, Any]
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Continuation: TypeAlias = "Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]]"
HEALTH_PREFIX = "/grpc.health.v1.Health/"
STATUS_PREFIX = "/mlxd.v1.StatusService/"
INQUIRY = Limits(nbytes=config.INQUIRY_BYTES_MAX, parts=config.INQUIRY_PARTS_MAX, numbers=0)
"""What a call that asks how a server is may hold: a name and an interval, and what a later version
may add. As many of them as a server works on at once have room on an account of their own."""
_log = get_logger("rpc")


def is_inquiry(method: str) -> bool:
    """Return whether a method asks for health or status: it is answered while others are not."""
    return method.startswith((HEALTH_PREFIX, STATUS_PREFIX))


def refuse_unread(answer: Callable[[Context], Awaitable[None]]) -> Handler:
    """Return a handler that aborts by `answer`, and reads nothing of the request.

    As a stream of bytes: so it serves whatever kind the method is.
    """

    async def refuse(_: AsyncIterator[bytes], context: Context) -> AsyncIterator[bytes]:
        await answer(context)
        yield b""  # never reached: this makes it a stream

    return grpc.stream_stream_rpc_method_handler(refuse)


async def abort(context: Context, error: MlxdError) -> NoReturn:
    """End the call with `error`'s status and details."""
    if isinstance(error, RemoteError):
        await context.abort(error.code, shorten(error.message))
    await context.abort_with_status(rpc_status.to_status(to_status(error)))
    raise AssertionError  # abort never returns


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Takes requests in and maps exceptions, of all four kinds of method."""

    def __init__(self, intake: Intake | None = None, *, proof: Proof | None = None) -> None:
        """Share `intake` among all methods but those that ask how the server is.

        proof: what the controller of this worker sends with requests that it has checked.
        """
        self._intake = intake or Intake()
        self._proof = proof
        self._inquiries = Intake(INQUIRY, held_nbytes_max=config.INQUIRIES_HELD_BYTES_MAX)

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Handler | None:
        """Wrap the method's handler."""
        handler = await continuation(handler_call_details)
        if handler is None:  # an unknown method: gRPC answers UNIMPLEMENTED
            return handler
        method = handler_call_details.method
        if is_inquiry(method):
            return _wrap(handler, method, self._inquiries)
        counted = None
        if self._proof is not None:
            counted = self._proof.size_of(handler_call_details.invocation_metadata)
        return _wrap(handler, method, self._intake, counted)


def _wrap(
    handler: Any,  # noqa: ANN401
    method: str,
    intake: Intake,
    counted: Size | None = None,
) -> Handler:
    guard = _guard_stream if handler.response_streaming else _guard_unary
    reader = _reader_of(handler.request_deserializer, intake.limits)
    each = handler.request_deserializer if reader is None else reader.whole
    taken = partial(_take_request, intake, reader, counted)
    return rewrap(
        handler,
        lambda behaviour: guard(behaviour, method, taken),
        request_deserializer=each if handler.request_streaming or reader is None else None,
    )


def rewrap(
    handler: Any,  # noqa: ANN401 - gRPC's are untyped
    wrap: Callable[[Any], Any],
    *,
    request_deserializer: Callable[[bytes], Any] | None,
) -> Handler:
    """Return a method's handler, of whatever kind, whose behaviour is what `wrap` makes of it."""
    taking = "stream" if handler.request_streaming else "unary"
    kind = f"{taking}_stream" if handler.response_streaming else f"{taking}_unary"
    wrapped: Handler = getattr(grpc, f"{kind}_rpc_method_handler")(
        wrap(getattr(handler, kind)),
        request_deserializer=request_deserializer,
        response_serializer=handler.response_serializer,
    )
    return wrapped


_Taken = Callable[[Any], AbstractAsyncContextManager[Any]]


def _reader_of(deserialize: Any, limits: Limits) -> Reader[Any] | None:  # noqa: ANN401
    """Return what reads a method's requests; None where they are no messages."""
    kind = getattr(deserialize, "__self__", None)
    if isinstance(kind, type) and issubclass(kind, Message):
        return Reader(kind, limits)
    return None


def _take_request(
    intake: Intake,
    reader: Reader[Any] | None,
    counted: Size | None,
    request: Any,  # noqa: ANN401
) -> AbstractAsyncContextManager[Any]:
    """Take a request in that comes as bytes; a stream of them is read one by one."""
    if reader is None or not isinstance(request, bytes):
        return nullcontext(request)
    return intake.take(request, reader, counted=counted)


def _guard_unary(behaviour: Any, method: str, taken: _Taken) -> Any:  # noqa: ANN401
    async def guard(raw: Any, context: Context) -> Any:  # noqa: ANN401
        request = None
        try:
            async with taken(raw) as request:
                return await behaviour(request, context)
        except grpc.aio.AbortError:
            raise
        except Exception as error:  # noqa: BLE001 - the one place where bugs become INTERNAL
            known = _as_known(error, method)
        del raw, request
        return await abort(context, _without_frames(known))

    return guard


def _guard_stream(behaviour: Any, method: str, taken: _Taken) -> Any:  # noqa: ANN401
    async def guard(raw: Any, context: Context) -> AsyncIterator[Any]:  # noqa: ANN401
        request = messages = None
        try:
            async with taken(raw) as request, aclosing(behaviour(request, context)) as messages:
                async for message in messages:
                    yield message
        except grpc.aio.AbortError:
            raise
        except Exception as error:  # noqa: BLE001 - the one place where bugs become INTERNAL
            known = _as_known(error, method)
        else:
            return
        del raw, request, messages
        await abort(context, _without_frames(known))

    return guard


def _without_frames(error: MlxdError) -> MlxdError:
    """Return an error that keeps nothing of its call alive.

    gRPC keeps an abort's error in a cycle with the call. The frames of a traceback know the
    request: what refused calls had sent, megabytes each, stayed until the collector came round.
    """
    error.__traceback__ = error.__cause__ = error.__context__ = None
    return error


def _as_known(error: Exception, method: str) -> MlxdError:
    if isinstance(error, MlxdError):
        _log.info("refused", method=method, error=type(error).__name__, reason=error.describe())
        return error
    error_id = uuid.uuid4().hex[:12]
    _log.error("internal error", method=method, error_id=error_id, exc_info=error)
    return InternalError(error_id)
