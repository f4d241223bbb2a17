"""The gRPC link to a worker: what goes with a request, and what a question in flight ends with."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from mlxd_controller.runtime.ports import Question
from mlxd_controller.runtime.worker_link import GrpcLink
from mlxd_shared.security.net import parse_address
from mlxd_shared.serving.server import Health, listen, make_server
from mlxd_shared.wire.interceptors import Context
from mlxd_shared.wire.proof import Checked, Proof
from mlxd_shared.wire.status import RemoteError
from mlxd_shared.wire.wire_scan import Size

LONG_S = 600.0


class Heard:
    """Ends every stream at once, answers every question with nothing, and notes what came."""

    def __init__(self) -> None:
        self.sizes: list[Size | None] = []
        self.proof = Proof.make()

    def _note(self, context: Context) -> None:
        self.sizes.append(self.proof.size_of(context.invocation_metadata()))

    async def stream(self, _: bytes, context: Context) -> AsyncIterator[bytes]:
        """Say nothing."""
        self._note(context)
        return
        yield b""  # never reached: this makes it a stream

    async def answer(self, _: bytes, context: Context) -> bytes:
        """Answer with nothing."""
        self._note(context)
        return b""

    def handlers(self) -> grpc.GenericRpcHandler:
        """Return what a controller asks of a model."""
        methods: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            question: grpc.unary_unary_rpc_method_handler(self.answer) for question in Question
        }
        methods["Generate"] = grpc.unary_stream_rpc_method_handler(self.stream)
        return grpc.method_handlers_generic_handler("mlxd.v1.InferenceService", methods)


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


@asynccontextmanager
async def serving(*handlers: grpc.GenericRpcHandler) -> AsyncIterator[str]:
    """Serve these around the body, which is given the address."""
    server = make_server(Health(), ())
    server.add_generic_rpc_handlers(handlers)
    address = listen(server, parse_address("127.0.0.1:0"))
    await server.start()
    try:
        yield address
    finally:
        await server.stop(0)


@pytest.mark.asyncio
async def test_a_request_goes_with_the_proof_that_it_was_checked() -> None:
    """Whatever is asked; where nobody counted what is in it, nothing is vouched."""
    heard, size = Heard(), Size(0, 3, 4)
    async with serving(heard.handlers()) as address:
        link = GrpcLink(address=address, incarnation="i-1", digest="d", proof=heard.proof)
        for checked in (Checked(b"", size=size), Checked(b"")):
            assert await link.generate(checked, timeout_s=LONG_S).read() is None
            for question in Question:
                assert await link.ask(question, checked, timeout_s=LONG_S) == b""
        await link.close()
    calls = 1 + len(Question)
    assert heard.sizes == [size] * calls + [None] * calls


@pytest.mark.asyncio
async def test_closing_ends_a_question_with_an_error_and_cancels_nobody() -> None:
    """Whoever asked, such as the poll of all workers, goes on: its task was not cancelled."""
    silent = Silent()
    async with serving(silent.handlers()) as address:
        link = GrpcLink(address=address, incarnation="i-1", digest="d")
        asking = asyncio.create_task(link.status(timeout_s=LONG_S))
        await silent.was_asked.wait()
        await link.close()
        with pytest.raises(RemoteError) as caught:
            await asking
        assert caught.value.code is grpc.StatusCode.CANCELLED
