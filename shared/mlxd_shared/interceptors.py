"""One server interceptor: every exception becomes a status with details, and nothing leaks.

MlxdError travels as `status.to_status` says. Anything else is a bug: the log gets the traceback
under an error id, the client gets INTERNAL with that id. A request that cannot be read is
InvalidRequest. CancelledError is re-raised untouched: swallowing it leaks the call's objects in
grpc.aio.
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, NoReturn

import grpc
from google.protobuf.message import DecodeError
from grpc_status import rpc_status

from mlxd_shared.errors import InternalError, InvalidRequest, MlxdError
from mlxd_shared.logs import get_logger
from mlxd_shared.status import RemoteError, shorten, to_status

Context = grpc.aio.ServicerContext[Any, Any]
_log = get_logger("rpc")


async def abort(context: Context, error: MlxdError) -> NoReturn:
    """End the call with `error`'s status and details."""
    if isinstance(error, RemoteError):
        await context.abort(error.code, shorten(error.message))
    await context.abort_with_status(rpc_status.to_status(to_status(error)))
    raise AssertionError  # abort never returns


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Maps exceptions of all four kinds of method."""

    async def intercept_service(
        self,
        continuation: Callable[
            [grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]
        ],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Wrap the method's handler."""
        handler = await continuation(handler_call_details)
        if handler is None:  # an unknown method: gRPC answers UNIMPLEMENTED
            return handler
        return _wrap(handler, handler_call_details.method)


def _wrap(handler: Any, method: str) -> grpc.RpcMethodHandler[Any, Any]:  # noqa: ANN401
    make = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }[handler.request_streaming, handler.response_streaming]
    behaviour = {
        (False, False): handler.unary_unary,
        (False, True): handler.unary_stream,
        (True, False): handler.stream_unary,
        (True, True): handler.stream_stream,
    }[handler.request_streaming, handler.response_streaming]
    read = handler.request_deserializer
    guard = _guard_stream if handler.response_streaming else _guard_unary
    wrapped: grpc.RpcMethodHandler[Any, Any] = make(
        guard(behaviour, method),
        request_deserializer=read if handler.request_streaming else _lenient(read),
        response_serializer=handler.response_serializer,
    )
    return wrapped


class _Unreadable:
    """Stands for a request that is no message of the method's type."""


def _lenient(deserialize: Callable[[bytes], Any] | None) -> Callable[[bytes], Any] | None:
    """Let what cannot be read reach the guard: outside it, the failure would be UNKNOWN."""
    if deserialize is None:
        return None

    def read(raw: bytes) -> Any:  # noqa: ANN401
        try:
            return deserialize(raw)
        except DecodeError:
            return _Unreadable()

    return read


def _check_readable(request: object) -> None:
    if isinstance(request, _Unreadable):
        raise InvalidRequest.of("request", "is not a message of this method's type")


def _guard_unary(behaviour: Any, method: str) -> Any:  # noqa: ANN401
    async def guarded(request: Any, context: Context) -> Any:  # noqa: ANN401
        try:
            _check_readable(request)
            return await behaviour(request, context)
        except grpc.aio.AbortError:
            raise
        except Exception as error:  # noqa: BLE001 - the one place where bugs become INTERNAL
            await abort(context, _known(error, method))

    return guarded


def _guard_stream(behaviour: Any, method: str) -> Any:  # noqa: ANN401
    async def guarded(request: Any, context: Context) -> AsyncIterator[Any]:  # noqa: ANN401
        try:
            _check_readable(request)
            async with aclosing(behaviour(request, context)) as messages:
                async for message in messages:
                    yield message
        except grpc.aio.AbortError:
            raise
        except Exception as error:  # noqa: BLE001 - the one place where bugs become INTERNAL
            await abort(context, _known(error, method))

    return guarded


def _known(error: Exception, method: str) -> MlxdError:
    if isinstance(error, MlxdError):
        _log.info("refused", method=method, error=type(error).__name__, reason=error.describe())
        return error
    error_id = uuid.uuid4().hex[:12]
    _log.error("internal error", method=method, error_id=error_id, exc_info=error)
    return InternalError(error_id)
