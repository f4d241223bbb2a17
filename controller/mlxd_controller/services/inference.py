"""InferenceService: checks a request, gets its model ready, and relays the worker's bytes as is.

Invariants:
- A lease is held from before the first byte to after the last, and released however the call ends.
- Messages are relayed unparsed, in order; only the last one is read, for the metrics and to know
  that the stream is complete. A stream that ends without a finish is WorkerLost.
- Fields that are the controller's to set are refused from its clients.
"""
# ruff: noqa: ARG002 - names and signatures are gRPC's

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from typing import Any, TypeVar

import grpc
import structlog

from mlxd.v1 import inference_pb2
from mlxd_controller.ports import Clock, ModelRef, RawStream, WorkerLink
from mlxd_controller.runtime import Lease, Runtime
from mlxd_controller.services.catalog import Catalog
from mlxd_controller.services.meter import Meter
from mlxd_shared import config
from mlxd_shared.convert import duration_to_pb, generate_from_pb
from mlxd_shared.errors import (
    DuplicateRequest,
    FieldNotServed,
    InvalidRequest,
    MlxdError,
    WorkerLost,
)
from mlxd_shared.interceptors import Context
from mlxd_shared.status import RemoteError

DEADLINE_MARGIN_S = 0.1
"""A wait for a model ends this much before the client's deadline, so that it hears why."""
_LOST = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.UNKNOWN)
_T = TypeVar("_T")


class InferenceService:
    """Implements the service; `add_to_server` registers it."""

    def __init__(self, catalog: Catalog, runtime: Runtime, clock: Clock) -> None:
        self._catalog = catalog
        self._runtime = runtime
        self._clock = clock
        self._in_flight: set[str] = set()

    async def generate(
        self, request: inference_pb2.GenerateRequest, context: Context
    ) -> AsyncGenerator[bytes, None]:
        """Relay a completion as serialised GenerateResponse messages."""
        meter = Meter(self._runtime.metrics, self._clock)
        with meter:
            _refuse_private(request)
            spec = generate_from_pb(request)
            ref = await self._catalog.find(spec.model)
            meter.model = ref.name
            with self._flight(request) as request_id:
                structlog.contextvars.bind_contextvars(request_id=request_id, model=ref.name)
                async with self._lease(ref, context, keep_alive_s=spec.keep_alive_s) as lease:
                    request.load_duration.CopyFrom(duration_to_pb(lease.waited_s))
                    async with aclosing(self._relay(lease, request, context, meter)) as frames:
                        async for frame in frames:
                            yield frame

    async def tokenize(
        self, request: inference_pb2.TokenizeRequest, context: Context
    ) -> inference_pb2.TokenizeResponse:
        """Turn text into token ids, by the model's own tokenizer."""
        _refuse_incarnation(request.worker_incarnation)
        if len(request.text) > config.PROMPT_CHARS_MAX:
            raise InvalidRequest.of("text", f"at most {config.PROMPT_CHARS_MAX} characters")
        ref = await self._catalog.find(request.model)
        async with self._lease(ref, context) as lease:
            link = _link(lease)
            return await _explained(
                lease, link.tokenize(request, timeout_s=context.time_remaining())
            )

    async def detokenize(
        self, request: inference_pb2.DetokenizeRequest, context: Context
    ) -> inference_pb2.DetokenizeResponse:
        """Turn token ids into text."""
        _refuse_incarnation(request.worker_incarnation)
        if len(request.token_ids) > config.TOKENIZE_IDS_MAX:
            raise InvalidRequest.of("token_ids", f"at most {config.TOKENIZE_IDS_MAX} ids")
        ref = await self._catalog.find(request.model)
        async with self._lease(ref, context) as lease:
            link = _link(lease)
            return await _explained(
                lease, link.detokenize(request, timeout_s=context.time_remaining())
            )

    async def embed(
        self, request: inference_pb2.EmbedRequest, context: Context
    ) -> inference_pb2.EmbedResponse:
        """Refuse: no served model gives embeddings yet."""
        _refuse_incarnation(request.worker_incarnation)
        raise FieldNotServed("Embed")

    # --- parts -----------------------------------------------------------------------------------

    @contextmanager
    def _flight(self, request: inference_pb2.GenerateRequest) -> Iterator[str]:
        """Hold the request's id, made if absent, against a second request with the same one."""
        if not request.request_id:
            request.request_id = uuid.uuid4().hex
        request_id = request.request_id
        if request_id in self._in_flight:
            raise DuplicateRequest(request_id)
        self._in_flight.add(request_id)
        try:
            yield request_id
        finally:
            self._in_flight.discard(request_id)

    @asynccontextmanager
    async def _lease(
        self, ref: ModelRef, context: Context, *, keep_alive_s: float | None = None
    ) -> AsyncIterator[Lease]:
        remaining_s = context.time_remaining()
        timeout_s = (
            config.LOAD_TOTAL_TIMEOUT_S
            if remaining_s is None
            else max(0.0, remaining_s - DEADLINE_MARGIN_S)
        )
        async with self._runtime.lease(
            ref, keep_alive_s=keep_alive_s, timeout_s=timeout_s
        ) as lease:
            yield lease

    async def _relay(
        self,
        lease: Lease,
        request: inference_pb2.GenerateRequest,
        context: Context,
        meter: Meter,
    ) -> AsyncGenerator[bytes, None]:
        stream = _link(lease).generate(request, timeout_s=context.time_remaining())
        lease.stream = stream
        last = b""
        try:
            while True:
                if lease.aborted is not None:
                    raise lease.aborted
                frame = await _read(stream, lease, last)
                if frame is None:
                    break
                meter.saw_frame()
                last = frame
                yield frame
        finally:
            stream.cancel()
        message = inference_pb2.GenerateResponse.FromString(last)
        if not message.HasField("finish"):
            raise WorkerLost(lease.model.name, _offset(last), "the stream ended without a finish")
        meter.complete(message)


async def _read(stream: RawStream, lease: Lease, last: bytes) -> bytes | None:
    try:
        frame = await stream.read()
    except RemoteError as error:
        raise await _explain(error, lease, _offset(last)) from error
    if frame is None and lease.aborted is not None:
        raise lease.aborted
    return frame


async def _explain(error: RemoteError, lease: Lease, offset: int) -> MlxdError:
    """Return what a broken connection means: an abort of ours, a dead worker, or itself."""
    if lease.aborted is not None:
        return lease.aborted
    if error.code not in _LOST:
        return error
    cause = await lease.worker.cause()
    return WorkerLost(lease.model.name, offset, cause or error.message)


async def _explained(lease: Lease, call: Awaitable[_T]) -> _T:
    try:
        return await call
    except RemoteError as error:
        raise await _explain(error, lease, 0) from error


def _link(lease: Lease) -> WorkerLink:
    assert lease.worker.link is not None
    return lease.worker.link


def _offset(last: bytes) -> int:
    """Return how many tokens the messages up to `last` carried."""
    message = inference_pb2.GenerateResponse.FromString(last)
    return message.offset + len(message.token_ids)


def _refuse_private(request: inference_pb2.GenerateRequest) -> None:
    _refuse_incarnation(request.worker_incarnation)
    if request.HasField("load_duration"):
        raise InvalidRequest.of("load_duration", "is set by the controller")


def _refuse_incarnation(incarnation: str) -> None:
    if incarnation:
        raise InvalidRequest.of("worker_incarnation", "is set by the controller")


def add_to_server(service: InferenceService, server: grpc.aio.Server) -> None:
    """Register the methods; Generate's messages leave as the bytes that came from the worker."""
    unary, stream = (
        grpc.unary_unary_rpc_method_handler,
        grpc.unary_stream_rpc_method_handler,
    )
    pb = inference_pb2
    handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
        "Generate": stream(service.generate, pb.GenerateRequest.FromString, None),
        "Tokenize": unary(
            service.tokenize,
            pb.TokenizeRequest.FromString,
            pb.TokenizeResponse.SerializeToString,
        ),
        "Detokenize": unary(
            service.detokenize,
            pb.DetokenizeRequest.FromString,
            pb.DetokenizeResponse.SerializeToString,
        ),
        "Embed": unary(
            service.embed, pb.EmbedRequest.FromString, pb.EmbedResponse.SerializeToString
        ),
    }
    name = pb.DESCRIPTOR.services_by_name["InferenceService"].full_name
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, handlers),))
