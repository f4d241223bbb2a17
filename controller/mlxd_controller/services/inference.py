"""InferenceService: checks a request, gets its model ready, and relays the worker's bytes as is.

Invariants:
- A lease is held from before the first byte to after the last, and released however the call ends.
- Messages are relayed unparsed, in order; only the last one is read, for the metrics and to know
  that the stream is complete. A stream that ends without a finish is WorkerLost.
- A worker that has gone before its first message is replaced, once: nothing was delivered yet.
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
from mlxd_controller.services.transcript import Transcript
from mlxd_shared import config
from mlxd_shared.convert import duration_to_pb, generate_from_pb
from mlxd_shared.errors import (
    DuplicateRequest,
    FieldNotServed,
    InvalidRequest,
    MlxdError,
    ModelDraining,
    ShuttingDown,
    WorkerLost,
    WrongWorker,
)
from mlxd_shared.interceptors import Context
from mlxd_shared.logs import get_logger
from mlxd_shared.status import RemoteError

DEADLINE_MARGIN_S = 0.1
"""A wait for a model ends this much before the client's deadline, so that it hears why."""
WORKERS_MAX = 2
"""How many workers one request may be sent to."""
LEAVING_WAIT_S = 5.0
"""What a worker that seems to be going gets to have gone; more than its grace for its streams."""
_LOST = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.UNKNOWN)
_GONE = (WorkerLost, ModelDraining, ShuttingDown, WrongWorker)
"""What a request hears from, or of, a worker that is going or has gone."""
_T = TypeVar("_T")
_log = get_logger("inference")


class InferenceService:
    """Implements the service; `add_to_server` registers it."""

    def __init__(
        self, catalog: Catalog, runtime: Runtime, clock: Clock, *, log_content: bool = False
    ) -> None:
        self._log_content = log_content
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
            transcript = Transcript(wanted=self._log_content)
            with self._flight(request) as request_id, transcript.of(request):
                structlog.contextvars.bind_contextvars(request_id=request_id, model=ref.name)
                served = self._served(ref, spec.keep_alive_s, request, context, meter)
                async with aclosing(served) as frames:
                    async for frame in frames:
                        transcript.saw_frame(frame)
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
        async with self._runtime.lease(
            ref, keep_alive_s=keep_alive_s, timeout_s=model_wait_s(context.time_remaining())
        ) as lease:
            yield lease

    async def _served(
        self,
        ref: ModelRef,
        keep_alive_s: float | None,
        request: inference_pb2.GenerateRequest,
        context: Context,
        meter: Meter,
    ) -> AsyncGenerator[bytes, None]:
        """Relay from a worker, or from another where the first had gone before its first word."""
        waited_s = 0.0
        for others in reversed(range(WORKERS_MAX)):
            async with self._lease(ref, context, keep_alive_s=keep_alive_s) as lease:
                waited_s += lease.waited_s
                request.load_duration.CopyFrom(duration_to_pb(waited_s))
                try:
                    async with aclosing(self._relay(lease, request, context, meter)) as frames:
                        async for frame in frames:
                            yield frame
                except _GONE as error:
                    if not others or meter.begun or lease.aborted is not None:
                        raise
                    gone = error
                else:
                    return
            if not await lease.worker.ended(wait_s=LEAVING_WAIT_S):
                raise gone
            _log.warning("sent to another worker", reason=gone.describe())

    async def _relay(
        self,
        lease: Lease,
        request: inference_pb2.GenerateRequest,
        context: Context,
        meter: Meter,
    ) -> AsyncGenerator[bytes, None]:
        stream = await _begun(lease, request, context)
        lease.stream = stream
        last = b""
        try:
            while True:
                frame = await _read(stream, lease, last)
                if frame is None:
                    break
                meter.saw_frame()
                last = frame
                yield frame
        except BaseException:
            meter.broke_off(_offset(last))
            raise
        finally:
            stream.cancel()
        message = inference_pb2.GenerateResponse.FromString(last)
        if not message.HasField("finish"):
            raise WorkerLost(lease.model.name, _offset(last), "the stream ended without a finish")
        meter.complete(message)


def model_wait_s(remaining_s: float | None) -> float:
    """Return how long a request may wait for its model, `remaining_s` before its deadline."""
    if remaining_s is None:
        return config.LOAD_TOTAL_TIMEOUT_S
    return remaining_s - min(DEADLINE_MARGIN_S, remaining_s / 2)


async def _begun(
    lease: Lease, request: inference_pb2.GenerateRequest, context: Context
) -> RawStream:
    try:
        return _link(lease).generate(request, timeout_s=context.time_remaining())
    except RemoteError as error:
        raise await _explain(error, lease, 0) from error


async def _read(stream: RawStream, lease: Lease, last: bytes) -> bytes | None:
    """Return the next message; raise what ended the stream, an abort of ours first of all."""
    if lease.aborted is not None:
        raise lease.aborted
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
    # gRPC's own words name the worker's address, which is not the client's to know.
    _log.warning("lost the connection to a worker", reason=error.describe())
    cause = await lease.worker.cause() or "the connection broke"
    return WorkerLost(lease.model.name, offset, cause)


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
