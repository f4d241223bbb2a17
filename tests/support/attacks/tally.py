"""What became of an attack's calls: by method and code, and which answers broke the promise."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import grpc
from google.rpc import error_details_pb2, status_pb2

from mlxd_shared.wire.status import TABLE

DOCUMENTED = {row.reason: row.code for row in TABLE if row.code is not grpc.StatusCode.INTERNAL}
"""What a call may be refused with; an internal error is a fault, however well it is described."""
OF_GRPC = {grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNIMPLEMENTED}
"""What the library itself says, without a reason: the client's own deadline, and no such method."""
TOO_LONG = "SERVER: Received message larger than max"
"""gRPC's own word for a message whose length alone is refused: no overload, it never fits."""
OVERLOAD = {grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE}
"""What says: come back later. So it says when."""
QUEUE_FULL = "QUEUE_FULL"
EXAMPLES_MAX = 10
_DETAILS_KEY = "grpc-status-details-bin"
_DETAIL_CHARS = 200


def count(counts: dict[str, int], name: str, number: int = 1) -> None:
    """Add to a count."""
    counts[name] = counts.get(name, 0) + number


@dataclass(slots=True)
class Tally:
    """Counts of one attack."""

    codes: dict[str, int] = field(default_factory=dict)
    """By method and code; LEFT where the client went itself."""
    undocumented: int = 0
    without_retry: int = 0
    queue_full: int = 0
    """Refused because a bound was reached, and told when to come back."""
    examples: list[str] = field(default_factory=list)
    """Of either."""
    worst_s: float = 0.0
    connections_made: int = 0
    connections_closed: int = 0

    def count_call(self, method: str, code: str, seconds: float) -> None:
        """Count a call that was answered, or left."""
        count(self.codes, f"{method} {code}")
        self.worst_s = max(self.worst_s, seconds)

    def saw_refusal(self, method: str, error: grpc.aio.AioRpcError, seconds: float) -> None:
        """Count a status, and judge it."""
        code = error.code()
        self.count_call(method, code.name, seconds)
        details = details_of(error)
        if (error.details() or "").startswith(TOO_LONG):
            return
        retry_s = retry_time_s(details)
        if reason_of(details) == QUEUE_FULL and retry_s:
            self.queue_full += 1
        if code in OVERLOAD and retry_s is None:
            self.without_retry += 1
        elif code not in OF_GRPC and code is not DOCUMENTED.get(reason_of(details)):
            self.undocumented += 1
        else:
            return
        if len(self.examples) < EXAMPLES_MAX:
            detail = (error.details() or "")[:_DETAIL_CHARS]
            self.examples.append(f"{method} {code.name}: {detail}")


def details_of(error: grpc.aio.AioRpcError) -> status_pb2.Status:
    """Return what a status carries beside its text; empty where that is nothing."""
    for key, value in error.trailing_metadata() or ():
        if key == _DETAILS_KEY and isinstance(value, bytes):
            return status_pb2.Status.FromString(value)
    return status_pb2.Status()


def retry_time_s(status: status_pb2.Status) -> float | None:
    """Return when a status says to come back; None where it does not say."""
    for detail in status.details:
        retry = error_details_pb2.RetryInfo()
        if detail.Unpack(retry):
            return float(retry.retry_delay.ToTimedelta().total_seconds())
    return None


def reason_of(status: status_pb2.Status) -> str:
    """Return the reason that a status names; empty where it names none."""
    for detail in status.details:
        info = error_details_pb2.ErrorInfo()
        if detail.Unpack(info):
            return str(info.reason)
    return ""


def together(tallies: Iterable[Tally]) -> Tally:
    """Return the sum of several."""
    whole = Tally()
    for tally in tallies:
        for name, number in tally.codes.items():
            count(whole.codes, name, number)
        whole.undocumented += tally.undocumented
        whole.without_retry += tally.without_retry
        whole.queue_full += tally.queue_full
        whole.connections_made += tally.connections_made
        whole.connections_closed += tally.connections_closed
        whole.examples += tally.examples
        whole.worst_s = max(whole.worst_s, tally.worst_s)
    return whole
