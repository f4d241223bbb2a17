"""A real server with a method of each kind that fails as its test says, and calls to it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from mlxd_shared.security.net import parse_address
from mlxd_shared.serving.server import Health, listen, make_server
from mlxd_shared.wire.interceptors import Context

LIMIT_S = 60.0
KINDS = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")


class Kinds(grpc.GenericRpcHandler):
    """One method of each kind, each of which does what `act` does, before or after a message.

    Each reads its requests to their end first. grpcio's client reports a send that fails because
    the server has ended the call as an internal error of its own, and loses the server's status.
    """

    def __init__(self, act: Callable[[], object], *, messages_first: int = 0) -> None:
        self._act = act
        self._messages_first = messages_first

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any] | None:
        async def unary(request: object, context: Context) -> bytes:
            await read_to_end(request)
            self._act()
            return b"answer"

        async def stream(request: object, context: Context) -> AsyncIterator[bytes]:
            await read_to_end(request)
            for _ in range(self._messages_first):
                yield b"message"
            self._act()
            yield b"last"

        handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            "/t.Kinds/unary_unary": grpc.unary_unary_rpc_method_handler(unary),
            "/t.Kinds/unary_stream": grpc.unary_stream_rpc_method_handler(stream),
            "/t.Kinds/stream_unary": grpc.stream_unary_rpc_method_handler(unary),
            "/t.Kinds/stream_stream": grpc.stream_stream_rpc_method_handler(stream),
        }
        return handlers.get(details.method)


async def read_to_end(request: object) -> None:
    """Take all that a client that streams has to send; a single request is there already."""
    if isinstance(request, AsyncIterable):
        async for _ in request:
            pass


@asynccontextmanager
async def serving(handler: grpc.GenericRpcHandler) -> AsyncIterator[grpc.aio.Channel]:
    """A real server with the interceptor, and a channel to it."""
    server = make_server(Health(), ())
    server.add_generic_rpc_handlers((handler,))
    address = listen(server, parse_address("127.0.0.1:0"))
    await server.start()
    async with grpc.aio.insecure_channel(address) as channel:
        yield channel
    await server.stop(None)


async def call(channel: grpc.aio.Channel, kind: str, sent: bytes = b"") -> list[bytes]:
    """Call the method of this kind and return its messages."""
    method = multi_callable(channel, kind)
    outgoing = iter([sent]) if kind.startswith("stream") else sent
    if kind.endswith("unary"):
        return [await method(outgoing)]
    return [message async for message in method(outgoing)]


def multi_callable(channel: grpc.aio.Channel, kind: str) -> Any:
    """The method of this kind, bytes in and bytes out, which its type cannot say."""
    make: dict[str, Any] = {
        "unary_unary": channel.unary_unary,
        "unary_stream": channel.unary_stream,
        "stream_unary": channel.stream_unary,
        "stream_stream": channel.stream_stream,
    }
    return make[kind](f"/t.Kinds/{kind}")


async def failure(channel: grpc.aio.Channel, kind: str = "unary_unary") -> grpc.aio.AioRpcError:
    """Call a method that fails, and return how."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await asyncio.wait_for(call(channel, kind), LIMIT_S)
    return caught.value


def raiser(error: BaseException) -> Callable[[], object]:
    """A function that raises `error`."""

    def act() -> object:
        raise error

    return act
