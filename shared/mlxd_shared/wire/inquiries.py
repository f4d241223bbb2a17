"""Calls that ask how a server is: they are answered while all others are refused.

Invariant: as many of them as a server works on at once have room on their account, whatever they
hold, so that neither requests nor other inquiries can fill it.
"""

from __future__ import annotations

from mlxd_shared import config
from mlxd_shared.wire.wire_scan import Limits

HEALTH_PREFIX = "/grpc.health.v1.Health/"
STATUS_PREFIX = "/mlxd.v1.StatusService/"

INQUIRY = Limits(nbytes=config.INQUIRY_BYTES_MAX, parts=config.INQUIRY_PARTS_MAX, numbers=0)
"""What one of them may hold: a name and an interval, and what a later version may add."""


def is_inquiry(method: str) -> bool:
    """Return whether a method asks for health or status."""
    return method.startswith((HEALTH_PREFIX, STATUS_PREFIX))
