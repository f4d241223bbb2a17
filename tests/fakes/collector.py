"""An OTLP collector on a port of its own, which keeps what it is sent."""

# ruff: noqa: N802 - gRPC names its methods

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc


@dataclass(frozen=True, slots=True)
class Sent:
    """A span as it came; ids in hexadecimal, times in ns."""

    service: str
    name: str
    trace_id: str
    id: str
    parent: str
    begun_ns: int
    ended_ns: int
    attributes: dict[str, Any]


@dataclass(slots=True)
class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """The service. `endpoint` is its URL."""

    endpoint: str = ""
    spans: list[Sent] = field(default_factory=list)
    _came: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def Export(
        self, request: trace_service_pb2.ExportTraceServiceRequest, context: Any
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        """Keep the spans."""
        for resource in request.resource_spans:
            service = _read_attributes(resource.resource.attributes)["service.name"]
            for scope in resource.scope_spans:
                self.spans += [_read_span(service, span) for span in scope.spans]
        async with self._came:
            self._came.notify_all()
        return trace_service_pb2.ExportTraceServiceResponse()

    async def wait(self, enough: Callable[[list[Sent]], bool]) -> None:
        """Return once the spans that have come are enough."""
        async with self._came:
            await self._came.wait_for(lambda: enough(self.spans))


def _read_attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in pairs}


def _read_span(service: str, span: Any) -> Sent:
    return Sent(
        service,
        span.name,
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        span.start_time_unix_nano,
        span.end_time_unix_nano,
        _read_attributes(span.attributes),
    )


@asynccontextmanager
async def collecting() -> AsyncIterator[Collector]:
    """Collect while the block lasts."""
    collector = Collector()
    server = grpc.aio.server()
    add: Any = trace_service_pb2_grpc.add_TraceServiceServicer_to_server  # untyped
    add(collector, server)
    collector.endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        yield collector
    finally:
        await server.stop(None)
