"""A method of each of gRPC's four kinds, and one call of any of them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, TypeAlias

import grpc

from mlxd_shared.security.secure_channel import ChannelSecurity, channel

WRITING_FAILED = "Internal error from Core"
"""The library's word for a request that could not be written to its end."""
TRIES_MAX = 5
TIMEOUT_S = 60.0
Metadata: TypeAlias = tuple[tuple[str, str], ...]
KINDS = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")


class Echo(grpc.GenericRpcHandler):
    """A method of each kind, which counts how often it was reached."""

    def __init__(self) -> None:
        self.reached = 0

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Return the method's handler."""
        kind = details.method.rpartition("/")[2]
        handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            "unary_unary": grpc.unary_unary_rpc_method_handler(self._one),
            "unary_stream": grpc.unary_stream_rpc_method_handler(self._many),
            "stream_unary": grpc.stream_unary_rpc_method_handler(self._one),
            "stream_stream": grpc.stream_stream_rpc_method_handler(self._many),
        }
        return handlers.get(kind)

    async def _one(self, _: object, __: object) -> bytes:
        self.reached += 1
        return b"answer"

    async def _many(self, _: object, __: object) -> AsyncIterator[bytes]:
        self.reached += 1
        yield b"answer"


async def ask(
    client: grpc.aio.Channel,
    kind: str = "unary_unary",
    *,
    method: str = "",
    body: bytes = b"hello",
    metadata: Metadata = (),
) -> bytes:
    """Call a method of this kind; return its answer, or the first one.

    Where an answer is there before the request has been written, the library may tell of the
    writing only; then it is called again.
    """
    for _ in range(TRIES_MAX - 1):
        try:
            return await _ask(client, kind, method=method, body=body, metadata=metadata)
        except grpc.aio.AioRpcError as error:
            if error.details() != WRITING_FAILED:
                raise
    return await _ask(client, kind, method=method, body=body, metadata=metadata)


async def _ask(
    client: grpc.aio.Channel, kind: str, *, method: str, body: bytes, metadata: Metadata
) -> bytes:
    makers: Any = {name: getattr(client, name) for name in KINDS}
    call = makers[kind](method or f"/probe.Echo/{kind}")
    request = body if kind.startswith("unary") else iter([body])
    done = call(request, timeout=TIMEOUT_S, metadata=metadata)
    answer: bytes = await (done if kind.endswith("unary") else done.read())
    return answer


async def outcome(address: str, security: ChannelSecurity) -> object:
    """Return the answer of one call, or the code that it failed with."""
    async with channel(address, security) as open_channel:
        try:
            return await ask(open_channel)
        except grpc.aio.AioRpcError as error:
            return error.code()
