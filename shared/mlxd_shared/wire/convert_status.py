"""What a status carries, to the wire and back: workers' figures, and the families of metrics."""

from __future__ import annotations

from mlxd.v1 import status_pb2
from mlxd_shared.domain.figures import HostMemory, ProcessStatus, WorkerFigures
from mlxd_shared.ops.metrics import Counter, Gauges, Histogram
from mlxd_shared.wire.convert import KV_FORMAT_FROM_PB, WEIGHTS_FROM_PB
from mlxd_shared.wire.records import read


def process_from_pb(pb: status_pb2.Status) -> ProcessStatus:
    """Return what a process says of itself and its workers; its counters are left out."""
    return ProcessStatus(
        version=pb.version,
        host=read(HostMemory, pb.host_memory),
        workers=tuple(figures_from_pb(worker) for worker in pb.workers),
    )


def figures_from_pb(pb: status_pb2.WorkerStatus) -> WorkerFigures:
    """Return all that is said of a worker."""
    is_known = pb.weights in WEIGHTS_FROM_PB and pb.kv_format in KV_FORMAT_FROM_PB
    return read(WorkerFigures, pb, form_is_known=is_known)


def counter_to_pb(counter: Counter) -> status_pb2.MetricFamily:
    """Return the family for the wire."""
    family = gauge_to_pb(counter.name, counter.help, counter.points)
    family.kind = status_pb2.METRIC_KIND_COUNTER
    return family


def histogram_to_pb(histogram: Histogram) -> status_pb2.MetricFamily:
    """Return the family for the wire."""
    return status_pb2.MetricFamily(
        name=histogram.name,
        help=histogram.help,
        kind=status_pb2.METRIC_KIND_HISTOGRAM,
        points=[
            status_pb2.MetricPoint(
                labels=dict(key),
                histogram=status_pb2.Histogram(
                    bounds=histogram.bounds, counts=counts, sum=histogram.sums[key]
                ),
            )
            for key, counts in sorted(histogram.counts.items())
        ],
    )


def gauge_to_pb(name: str, help_text: str, values: Gauges) -> status_pb2.MetricFamily:
    """Return the family of a gauge, read at this moment."""
    return status_pb2.MetricFamily(
        name=name,
        help=help_text,
        kind=status_pb2.METRIC_KIND_GAUGE,
        points=[
            status_pb2.MetricPoint(labels=dict(key), value=value)
            for key, value in sorted(values.items())
        ],
    )
