"""Tracers for tests: spans that stay in this process."""

from __future__ import annotations

from collections.abc import Sequence

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from mlxd_shared.ops.tracing import Tracer


class Kept:
    """A tracer, and the spans that have ended."""

    def __init__(self) -> None:
        """Begin with none."""
        self._exporter = InMemorySpanExporter()
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.tracer = Tracer(provider)

    @property
    def spans(self) -> Sequence[ReadableSpan]:
        """Every span that has ended, in that order."""
        return self._exporter.get_finished_spans()


def trace_id_of(span: ReadableSpan) -> str:
    """Return a span's trace as `traceparent` writes it."""
    assert span.context is not None
    return f"{span.context.trace_id:032x}"


def id_of(span: ReadableSpan) -> str:
    """Return a span's id as `traceparent` writes it."""
    assert span.context is not None
    return f"{span.context.span_id:016x}"


def parent_of(span: ReadableSpan) -> str:
    """Return the id of a span's parent; empty: it has none."""
    return "" if span.parent is None else f"{span.parent.span_id:016x}"
