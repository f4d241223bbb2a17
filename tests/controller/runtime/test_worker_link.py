"""The gRPC link to a worker that does not answer, while it is let go of."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from mlxd_controller.runtime.worker_link import GrpcLink
from mlxd_shared.security.net import parse_address
from mlxd_shared.serving.server import Health, listen, make_server
from mlxd_shared.wire.interceptors import Context
from mlxd_shared.wire.status import RemoteError

LONG_S = 600.0


class Silent:
    """Takes a question and never answers."""

    def __init__(self) -> None:
        self.was_asked = asyncio.Event()

    async def answer(self, question: bytes, context: Context) -> bytes:
        """Wait for ever."""
        self.was_asked.set()
        await asyncio.Event().wait()
        return b""

    def handlers(self) -> grpc.GenericRpcHandler:
        """Return GetStatus."""
        method: grpc.RpcMethodHandler[bytes, bytes] = grpc.unary_unary_rpc_method_handler(
            self.answer
        )
        return grpc.method_handlers_generic_handler("mlxd.v1.StatusService", {"GetStatus": method})


@pytest.mark.asyncio
async def test_closing_ends_a_question_with_an_error_and_cancels_nobody() -> None:
    """Whoever asked, such as the poll of all workers, goes on: its task was not cancelled."""
    silent = Silent()
    server = make_server(Health(), ())
    server.add_generic_rpc_handlers((silent.handlers(),))
    address = listen(server, parse_address("127.0.0.1:0"))
    await server.start()
    try:
        link = GrpcLink(address=address, incarnation="i-1", digest="d")
        asking = asyncio.create_task(link.status(timeout_s=LONG_S))
        await silent.was_asked.wait()
        await link.close()
        with pytest.raises(RemoteError) as caught:
            await asking
        assert caught.value.code is grpc.StatusCode.CANCELLED
    finally:
        await server.stop(0)
