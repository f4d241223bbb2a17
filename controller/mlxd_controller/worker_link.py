"""The gRPC connection to one worker: protobuf stops here, and what may be large stays bytes.

Invariants:
- Every request names the model's digest and the worker's incarnation; a process that happens to
  listen on the address of another is never taken for it.
- Deadlines are the caller's to give: they go to the worker with each call.
- A call that close() ends, or that comes after it, raises RemoteError: nobody cancelled its caller.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import TypeAlias, TypeVar

import grpc
from google.protobuf.message import Message

from mlxd.v1 import (
    inference_pb2,
    inference_pb2_grpc,
    status_pb2,
    status_pb2_grpc,
    types_pb2,
    worker_pb2,
    worker_pb2_grpc,
)
from mlxd_controller.core.state import Progress
from mlxd_controller.ports import LoadOrder
from mlxd_shared import config
from mlxd_shared.convert import load_to_pb
from mlxd_shared.known_process import ProcessMark
from mlxd_shared.secure_channel import PLAIN, ChannelSecurity, channel
from mlxd_shared.status import RemoteError, from_call

GENERATE_METHOD = "/mlxd.v1.InferenceService/Generate"
TOKENIZE_METHOD = "/mlxd.v1.InferenceService/Tokenize"
DETOKENIZE_METHOD = "/mlxd.v1.InferenceService/Detokenize"
_T = TypeVar("_T")


Generate: TypeAlias = grpc.aio.UnaryStreamMultiCallable[inference_pb2.GenerateRequest, bytes]
Tokenize: TypeAlias = grpc.aio.UnaryUnaryMultiCallable[inference_pb2.TokenizeRequest, bytes]
Detokenize: TypeAlias = grpc.aio.UnaryUnaryMultiCallable[inference_pb2.DetokenizeRequest, bytes]
RawCall: TypeAlias = grpc.aio.UnaryStreamCall[inference_pb2.GenerateRequest, bytes]


class GrpcRawStream:
    """Implements ports.RawStream."""

    def __init__(self, call: RawCall) -> None:
        """Take over `call`."""
        self._call = call

    async def read(self) -> bytes | None:
        """Return the next message, None at the end; see the port."""
        try:
            message = await self._call.read()
        except grpc.RpcError as error:
            raise from_call(error) from error
        except asyncio.CancelledError:
            _raise_if_ended_here()
            raise
        return message if isinstance(message, bytes) else None

    def cancel(self) -> None:
        """Tell the worker to stop."""
        self._call.cancel()


class GrpcLink:
    """Implements ports.WorkerLink."""

    def __init__(
        self, *, address: str, incarnation: str, digest: str, security: ChannelSecurity = PLAIN
    ) -> None:
        """Name the worker; nothing is sent yet.

        Raises:
            InvalidRequest, BadCredentials: see secure_channel.
        """
        self._incarnation = incarnation
        self._digest = digest
        self._closed = False
        self._channel = channel(address, security)
        self._generate: Generate = self._channel.unary_stream(
            GENERATE_METHOD,
            request_serializer=inference_pb2.GenerateRequest.SerializeToString,
            response_deserializer=None,
        )
        # Their answers may be millions of ids, or megabytes of text: nobody here reads them.
        self._tokenize: Tokenize = self._channel.unary_unary(
            TOKENIZE_METHOD,
            request_serializer=inference_pb2.TokenizeRequest.SerializeToString,
            response_deserializer=None,
        )
        self._detokenize: Detokenize = self._channel.unary_unary(
            DETOKENIZE_METHOD,
            request_serializer=inference_pb2.DetokenizeRequest.SerializeToString,
            response_deserializer=None,
        )
        self._inference = inference_pb2_grpc.InferenceServiceStub(self._channel)
        self._status = status_pb2_grpc.StatusServiceStub(self._channel)
        self._worker = worker_pb2_grpc.WorkerServiceStub(self._channel)

    async def load(self, order: LoadOrder) -> AsyncGenerator[Progress, None]:
        """Load and yield the progress; see the port."""
        call = self._worker.Load(
            worker_pb2.LoadRequest(
                worker_incarnation=self._incarnation,
                path=order.path,
                name=order.name,
                digest=order.digest,
                options=load_to_pb(order.spec),
            ),
            timeout=config.LOAD_TOTAL_TIMEOUT_S,
        )
        try:
            async for message in call:
                yield _progress(message.progress)
        except grpc.RpcError as error:
            raise from_call(error) from error
        finally:
            call.cancel()

    def generate(
        self, request: inference_pb2.GenerateRequest, *, timeout_s: float | None
    ) -> GrpcRawStream:
        """Start a Generate; `request` is changed and then owned by the link."""
        self._check_open()
        request.model = self._digest
        request.worker_incarnation = self._incarnation
        return GrpcRawStream(self._generate(request, timeout=timeout_s))

    async def tokenize(
        self, request: inference_pb2.TokenizeRequest, *, timeout_s: float | None
    ) -> bytes:
        """Ask the worker's tokenizer; the answer is a message's bytes."""
        request.model = self._digest
        request.worker_incarnation = self._incarnation
        return await self._ask(self._tokenize, request, timeout_s)

    async def detokenize(
        self, request: inference_pb2.DetokenizeRequest, *, timeout_s: float | None
    ) -> bytes:
        """Ask the worker's tokenizer; the answer is a message's bytes."""
        request.model = self._digest
        request.worker_incarnation = self._incarnation
        return await self._ask(self._detokenize, request, timeout_s)

    async def embed(
        self, request: inference_pb2.EmbedRequest, *, timeout_s: float | None
    ) -> inference_pb2.EmbedResponse:
        """Ask for the vectors of texts."""
        request.model = self._digest
        request.worker_incarnation = self._incarnation
        return await self._ask(self._inference.Embed, request, timeout_s)

    async def status(self, *, timeout_s: float) -> status_pb2.Status:
        """Return what the worker says of itself."""
        request = status_pb2.GetStatusRequest()
        return (await self._ask(self._status.GetStatus, request, timeout_s)).status

    async def unload(self, *, timeout_s: float) -> None:
        """Drop the model; the process stays."""
        request = worker_pb2.UnloadRequest(worker_incarnation=self._incarnation)
        await self._ask(self._worker.Unload, request, timeout_s)

    async def shrink(self, target_bytes: int, *, timeout_s: float) -> tuple[int, int]:
        """Have it give back what no stream needs; see the port."""
        request = worker_pb2.ShrinkRequest(
            worker_incarnation=self._incarnation, target_bytes=target_bytes
        )
        answer = await self._ask(self._worker.Shrink, request, timeout_s)
        return answer.bytes_before, answer.bytes_after

    async def shutdown(self, *, timeout_s: float) -> None:
        """Tell the process to end after it has answered."""
        request = worker_pb2.ShutdownRequest(worker_incarnation=self._incarnation)
        await self._ask(self._worker.Shutdown, request, timeout_s)

    async def adopt(self, controller: ProcessMark, *, output_path: str, timeout_s: float) -> None:
        """Have the worker follow this controller, and write to a named pipe that has a reader."""
        request = worker_pb2.AdoptRequest(
            worker_incarnation=self._incarnation,
            controller_pid=controller.pid,
            controller_start=controller.start,
            output_path=output_path,
        )
        await self._ask(self._worker.Adopt, request, timeout_s)

    async def close(self) -> None:
        """Let go of the connection; running calls end."""
        self._closed = True
        await asyncio.shield(self._channel.close())

    def _check_open(self) -> None:
        if self._closed:
            raise RemoteError(grpc.StatusCode.UNAVAILABLE, "the connection was let go of")

    async def _ask(
        self, method: Callable[..., Awaitable[_T]], request: Message, timeout_s: float | None
    ) -> _T:
        self._check_open()
        try:
            return await method(request, timeout=timeout_s)
        except grpc.RpcError as error:
            raise from_call(error) from error
        except asyncio.CancelledError:
            _raise_if_ended_here()
            raise


def _raise_if_ended_here() -> None:
    """Turn gRPC's CancelledError into an error where a call was cancelled and its task was not."""
    task = asyncio.current_task()
    if task is None or task.cancelling() == 0:
        raise RemoteError(grpc.StatusCode.CANCELLED, "the call was ended here") from None


def _progress(pb: types_pb2.LoadProgress) -> Progress:
    return Progress(pb.stage, pb.bytes_read, pb.bytes_total)
