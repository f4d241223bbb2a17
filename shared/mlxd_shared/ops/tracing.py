"""Traces by OpenTelemetry, where OTEL_* variables ask for them; nothing is imported otherwise.

Invariants:
- A span's parent is the caller's, as `traceparent` and `tracestate` of W3C's Trace Context name it,
  in HTTP's heads and in gRPC's metadata alike. What is not well-formed is no parent.
- Spans leave by a thread of the SDK's own. A collector that is slow or gone costs spans, not time,
  and a line of the log every TRACES_LOG_INTERVAL_S. The end of a process waits for one that is slow
  for TRACES_FLUSH_S, and not for one whose last answer was none.
- No prompt, no output and no credential is ever an attribute.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Final, TypeAlias

from mlxd_shared import config
from mlxd_shared.domain.errors import InvalidRequest
from mlxd_shared.ops.logs import get_logger

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span as OtelSpan
    from opentelemetry.trace import Tracer as OtelTracer

Attribute: TypeAlias = "str | int | float | bool | tuple[str, ...]"
NAMES: Final = ("traceparent", "tracestate")
ENDPOINTS: Final = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
PROTOCOLS: Final = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
FLUSH_THREAD: Final = "traces-flush"
_NS_PER_S = 1_000_000_000
_SDK, _EXPORTERS = "opentelemetry", "opentelemetry.exporter."
_COMPLAINT_CHARS_MAX = 500
_log = get_logger("tracing")


class Span:
    """What one process does for one request: begun by a `Tracer`, and to be ended once."""

    def __init__(self, tracer: OtelTracer, own: OtelSpan) -> None:
        self._tracer = tracer
        self._own = own

    @property
    def headers(self) -> tuple[tuple[str, str], ...]:
        """What calls carry that are made for this request, so that theirs are its children."""
        from opentelemetry.trace import set_span_in_context  # noqa: PLC0415
        from opentelemetry.trace.propagation.tracecontext import (  # noqa: PLC0415
            TraceContextTextMapPropagator,
        )

        carrier: dict[str, str] = {}
        TraceContextTextMapPropagator().inject(carrier, set_span_in_context(self._own))
        return tuple(carrier.items())

    def note(self, attributes: Mapping[str, Attribute]) -> None:
        """Add attributes."""
        self._own.set_attributes(attributes)

    def rename(self, name: str) -> None:
        """Give it another name."""
        self._own.update_name(name)

    def add_phase(self, name: str, begun_ago_s: float, ended_ago_s: float) -> None:
        """Add a child that is over: a phase of the work, by how long ago it began and ended."""
        from opentelemetry.trace import set_span_in_context  # noqa: PLC0415

        now_ns = time.time_ns()
        phase = self._tracer.start_span(
            name,
            context=set_span_in_context(self._own),
            start_time=now_ns - round(begun_ago_s * _NS_PER_S),
        )
        phase.end(now_ns - round(ended_ago_s * _NS_PER_S))

    def end(self, *, problem: str = "") -> None:
        """End it; `problem` says why it failed, where it did."""
        from opentelemetry.trace import Status, StatusCode  # noqa: PLC0415

        if problem:
            self._own.set_status(Status(StatusCode.ERROR, problem))
        self._own.end()


current_span: ContextVar[Span | None] = ContextVar("current_span", default=None)
"""The span of the call that the current task works on; None where nothing is traced."""


class Tracer:
    """Begins spans; owns the SDK's provider."""

    def __init__(self, provider: TracerProvider, *, failing: threading.Event | None = None) -> None:
        """Take a provider that has its exporter; `failing` is set while that has no success."""
        self._provider = provider
        self._failing = failing
        self._tracer = provider.get_tracer("mlxd")

    def begin(self, name: str, metadata: Iterable[tuple[str, object]]) -> Span:
        """Begin a span of a server, whose caller sent `metadata`, its names in lower case."""
        from opentelemetry.trace import SpanKind  # noqa: PLC0415
        from opentelemetry.trace.propagation.tracecontext import (  # noqa: PLC0415
            TraceContextTextMapPropagator,
        )

        carrier = {key: str(value) for key, value in metadata if key in NAMES}
        parent = TraceContextTextMapPropagator().extract(carrier)
        own = self._tracer.start_span(name, context=parent, kind=SpanKind.SERVER)
        return Span(self._tracer, own)

    def close(self, *, flush_s: float = config.TRACES_FLUSH_S) -> None:
        """Send what is left, within `flush_s`; blocks for as long, or until that fails."""
        over = self._failing or threading.Event()

        def flush() -> None:
            self._provider.shutdown()
            over.set()

        threading.Thread(target=flush, name=FLUSH_THREAD, daemon=True).start()
        over.wait(flush_s)


class Complaints(logging.Handler):
    """What the SDK warns of, as lines of our log: at most one every TRACES_LOG_INTERVAL_S.

    The SDK repeats itself each second for as long as a collector is down. What it says of its
    settings comes without their values, which may be credentials.
    """

    def __init__(self, *, now_s: Callable[[], float] = time.monotonic) -> None:
        """Measure time by `now_s`, in seconds."""
        super().__init__(logging.WARNING)
        self._now_s = now_s
        self._unsaid = 0
        self._said_s: float | None = None
        self.failing = threading.Event()
        """Set by what an exporter says; whoever sees it succeed clears that."""

    def emit(self, record: logging.LogRecord) -> None:
        """Count one warning, and say it if none was said of late. The caller holds the lock."""
        is_export = record.name.startswith(_EXPORTERS)
        if is_export:
            self.failing.set()
        self._unsaid += 1
        now_s = self._now_s()
        if self._said_s is not None and now_s - self._said_s < config.TRACES_LOG_INTERVAL_S:
            return
        problem = record.getMessage() if is_export else str(record.msg)
        _log.warning("tracing fails", count=self._unsaid, problem=problem[:_COMPLAINT_CHARS_MAX])
        self._unsaid, self._said_s = 0, now_s


def tracer_of(service: str, environment: Mapping[str, str]) -> Tracer | None:
    """Return what traces a process, as OTEL_* variables say; None where they ask for no traces.

    The SDK reads the others itself: endpoint, headers, sampler, limits, resource. `service` is
    the process's name, unless OTEL_SERVICE_NAME gives another.

    Raises:
        InvalidRequest: what a variable asks for is not there, or makes no sense to the SDK.
    """
    if not wants_traces(environment):
        return None
    variable = next((name for name in ENDPOINTS if environment.get(name)), "OTEL_TRACES_EXPORTER")
    try:
        complaints = Complaints()
        provider = _make_provider(environment.get("OTEL_SERVICE_NAME") or service, complaints)
    except ImportError as error:
        raise InvalidRequest.of(
            variable, "needs the extra otel: pip install 'mlxd[otel]'"
        ) from error
    except ValueError as error:
        raise InvalidRequest.of("OTEL_*", f"{error!s:.200}") from error
    return Tracer(provider, failing=complaints.failing)


def _make_provider(service: str, complaints: Complaints) -> TracerProvider:
    """Return the SDK's provider with an exporter, whose complaints go to `complaints`.

    Raises:
        ImportError: one of the packages is missing.
        ValueError: a variable that the SDK reads makes no sense.
    """
    from opentelemetry.exporter.otlp.proto.grpc.exporter import (  # noqa: PLC0415
        InvalidCompressionValueException,
    )
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import (  # noqa: PLC0415
        OTLPSpanExporter,
    )
    from opentelemetry.sdk.resources import Resource  # noqa: PLC0415
    from opentelemetry.sdk.trace import ReadableSpan, TracerProvider  # noqa: PLC0415
    from opentelemetry.sdk.trace.export import (  # noqa: PLC0415
        BatchSpanProcessor,
        SpanExportResult,
    )

    class Exporter(OTLPSpanExporter):
        def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
            result = super().export(spans)
            if result is SpanExportResult.SUCCESS:
                complaints.failing.clear()
            return result

    sdk = logging.getLogger(_SDK)
    sdk.handlers, sdk.propagate = [complaints], False
    provider = TracerProvider(
        resource=Resource.create({"service.name": service}), shutdown_on_exit=False
    )
    try:
        provider.add_span_processor(BatchSpanProcessor(Exporter()))
    except InvalidCompressionValueException as error:
        raise ValueError(str(error)) from error
    return provider


def wants_traces(environment: Mapping[str, str]) -> bool:
    """Return whether OTEL_* variables ask for traces: an endpoint, or the exporter by its name.

    Raises:
        InvalidRequest: they ask for another exporter than OTLP, or for OTLP not over gRPC.
    """
    if environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return False
    exporter = environment.get("OTEL_TRACES_EXPORTER", "")
    if exporter == "none" or not (exporter or any(environment.get(name) for name in ENDPOINTS)):
        return False
    if exporter not in ("", "otlp"):
        raise InvalidRequest.of("OTEL_TRACES_EXPORTER", f"otlp or none, not {exporter:.40}")
    protocol, name = next(
        ((environment[name], name) for name in PROTOCOLS if environment.get(name)), ("grpc", "")
    )
    if protocol != "grpc":
        raise InvalidRequest.of(name, f"traces are sent by grpc, not by {protocol:.40}")
    return True
