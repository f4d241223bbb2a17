"""The gRPC connection to one worker: protobuf stops here, and what may be large stays bytes.

Every request names the model's digest and the worker's incarnation, so that a process that listens
on another's address is never mistaken for it. A call that close() ends, or that comes after it,
raises RemoteError: nobody cancelled its caller.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from functools import partial
from types import TracebackType
from typing import TypeAlias, TypeVar

import grpc
from google.protobuf.message import Message

from mlxd.v1 import (
    inference_pb2,
    score_pb2,
    status_pb2,
    status_pb2_grpc,
    types_pb2,
    worker_pb2,
    worker_pb2_grpc,
)
from mlxd_controller.runtime.ports import Question
from mlxd_shared import config
from mlxd_shared.domain.figures import LoadProgress, ProcessStatus
from mlxd_shared.domain.requests import LoadSpec
from mlxd_shared.ops.known_process import ProcessMark
from mlxd_shared.security.secure_channel import PLAIN, ChannelSecurity, channel
from mlxd_shared.wire.convert_status import process_from_pb
from mlxd_shared.wire.proof import Checked, Proof
from mlxd_shared.wire.records import duration_to_pb, read, write
from mlxd_shared.wire.status import RemoteError, from_call

MEMORY_AS_IT_IS = (1 << 64) - 1
"""A target that every worker is below."""
_T = TypeVar("_T")
_PREFIX = "/mlxd.v1.InferenceService/"
_Generate: TypeAlias = grpc.aio.UnaryStreamMultiCallable[bytes, bytes]
_Kind: TypeAlias = Callable[..., Message]
_REQUESTS: dict[Question, _Kind] = {
    Question.TOKENIZE: inference_pb2.TokenizeRequest,
    Question.DETOKENIZE: inference_pb2.DetokenizeRequest,
    Question.EMBED: inference_pb2.EmbedRequest,
    Question.SCORE: score_pb2.ScoreRequest,
}


class GrpcRawStream:
    """Implements ports.RawStream."""

    def __init__(self, call: grpc.aio.UnaryStreamCall[bytes, bytes]) -> None:
        self._call = call

    async def read(self) -> bytes | None:
        """Return the next message, None at the end; see the port."""
        with _own_errors:
            message = await self._call.read()
        return message if isinstance(message, bytes) else None

    def cancel(self) -> None:
        """See the port."""
        self._call.cancel()


class GrpcLink:
    """Implements ports.WorkerLink."""

    def __init__(
        self,
        *,
        address: str,
        incarnation: str,
        digest: str,
        proof: Proof | None = None,
        security: ChannelSecurity = PLAIN,
    ) -> None:
        """Set up the channel; nothing is sent yet.

        Raises:
            InvalidRequest, BadCredentials: see secure_channel.
        """
        self._incarnation = incarnation
        self._digest = digest
        self._proof = proof
        self._closed = False
        self._channel = channel(address, security)
        self._generate: _Generate = self._channel.unary_stream(
            f"{_PREFIX}Generate", request_serializer=None, response_deserializer=None
        )
        # The answers may be millions of ids, or megabytes of text: nobody here parses them.
        self._questions: dict[Question, grpc.aio.UnaryUnaryMultiCallable[bytes, bytes]] = {
            question: self._channel.unary_unary(
                f"{_PREFIX}{question}", request_serializer=None, response_deserializer=None
            )
            for question in Question
        }
        self._status = status_pb2_grpc.StatusServiceStub(self._channel)
        self._worker = worker_pb2_grpc.WorkerServiceStub(self._channel)

    async def load(
        self, name: str, path: str, spec: LoadSpec
    ) -> AsyncGenerator[LoadProgress, None]:
        """Load and yield the progress; see the port."""
        call = self._worker.Load(
            worker_pb2.LoadRequest(
                worker_incarnation=self._incarnation,
                path=path,
                name=name,
                digest=self._digest,
                options=write(spec, types_pb2.LoadOptions),
            ),
            timeout=config.LOAD_TOTAL_TIMEOUT_S,
        )
        try:
            with _own_errors:
                async for message in call:
                    yield read(LoadProgress, message.progress)
        finally:
            call.cancel()

    def generate(self, request: Checked, *, timeout_s: float | None) -> GrpcRawStream:
        """Start a Generate; see the port."""
        self._check_open()
        raw = self._address(request, inference_pb2.GenerateRequest)
        metadata = request.vouched_by(self._proof)
        return GrpcRawStream(self._generate(raw, timeout=timeout_s, metadata=metadata))

    async def ask(self, question: Question, request: Checked, *, timeout_s: float | None) -> bytes:
        """Return the worker's answer; see the port."""
        raw = self._address(request, _REQUESTS[question])
        method = partial(self._questions[question], metadata=request.vouched_by(self._proof))
        return await self._ask(method, raw, timeout_s)

    async def status(self, *, timeout_s: float) -> ProcessStatus:
        """Return what the worker reports of itself."""
        request = status_pb2.GetStatusRequest()
        answer = await self._ask(self._status.GetStatus, request, timeout_s)
        return process_from_pb(answer.status)

    async def watch(self, *, interval_s: float) -> AsyncGenerator[ProcessStatus, None]:
        """Yield what the worker reports of itself; see the port."""
        self._check_open()
        request = status_pb2.WatchStatusRequest(interval=duration_to_pb(interval_s))
        call = self._status.WatchStatus(request)
        try:
            with _own_errors:
                async for message in call:
                    yield process_from_pb(message.status)
        finally:
            call.cancel()

    async def share_disk(self, nbytes: int, *, timeout_s: float) -> None:
        """Have it keep to a share of the disk; see the port."""
        request = worker_pb2.ShrinkRequest(
            worker_incarnation=self._incarnation,
            target_bytes=MEMORY_AS_IT_IS,
            prefix_disk_bytes=nbytes,
        )
        await self._ask(self._worker.Shrink, request, timeout_s)

    async def unload(self, *, timeout_s: float) -> None:
        """Unload its model; see the port."""
        request = worker_pb2.UnloadRequest(worker_incarnation=self._incarnation)
        await self._ask(self._worker.Unload, request, timeout_s)

    async def shrink(self, target_bytes: int, *, timeout_s: float) -> tuple[int, int]:
        """Have it release what no stream needs; see the port."""
        request = worker_pb2.ShrinkRequest(
            worker_incarnation=self._incarnation, target_bytes=target_bytes
        )
        answer = await self._ask(self._worker.Shrink, request, timeout_s)
        return answer.bytes_before, answer.bytes_after

    async def shutdown(self, *, timeout_s: float) -> None:
        """Have the process end after it has answered."""
        request = worker_pb2.ShutdownRequest(worker_incarnation=self._incarnation)
        await self._ask(self._worker.Shutdown, request, timeout_s)

    async def adopt(self, controller: ProcessMark, *, output_path: str, timeout_s: float) -> None:
        """Have the worker follow this controller; see the port."""
        request = worker_pb2.AdoptRequest(
            worker_incarnation=self._incarnation,
            controller_pid=controller.pid,
            controller_start=controller.start,
            output_path=output_path,
        )
        await self._ask(self._worker.Adopt, request, timeout_s)

    async def close(self) -> None:
        """Close the connection; running calls end."""
        self._closed = True
        await asyncio.shield(self._channel.close())

    def _address(self, request: Checked, kind: _Kind) -> bytes:
        """Return `request` addressed to this worker."""
        address = kind(model=self._digest, worker_incarnation=self._incarnation)
        return request.whole(address.SerializeToString())

    def _check_open(self) -> None:
        if self._closed:
            raise RemoteError(grpc.StatusCode.UNAVAILABLE, "the connection is closed")

    async def _ask(
        self,
        method: Callable[..., Awaitable[_T]],
        request: Message | bytes,
        timeout_s: float | None,
    ) -> _T:
        self._check_open()
        with _own_errors:
            return await method(request, timeout=timeout_s)


class _OwnErrors:
    """Turns gRPC's errors into ours, even its CancelledError if nobody cancelled the task.

    Stateless: every message of every stream passes through it.
    """

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if isinstance(error, grpc.RpcError):
            raise from_call(error) from error
        if isinstance(error, asyncio.CancelledError):
            task = asyncio.current_task()
            if task is None or task.cancelling() == 0:
                message = "the controller ended the call"
                raise RemoteError(grpc.StatusCode.CANCELLED, message) from None


_own_errors = _OwnErrors()
