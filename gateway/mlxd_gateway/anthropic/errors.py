"""Failures in the shape of Anthropic's API."""

from __future__ import annotations

from typing import Any

from mlxd_gateway.common.failures import Failure, FailureKind

TYPES = {
    FailureKind.UNAUTHENTICATED: "authentication_error",
    FailureKind.FORBIDDEN: "permission_error",
    FailureKind.NOT_FOUND: "not_found_error",
    FailureKind.TOO_LARGE: "request_too_large",
    FailureKind.BUSY: "rate_limit_error",
    FailureKind.BUG: "api_error",
    FailureKind.BROKEN: "api_error",
    FailureKind.UNAVAILABLE: "overloaded_error",
    FailureKind.LATE: "timeout_error",
}


def error_body(failure: Failure) -> dict[str, Any]:
    """Return the body of an error; its message begins with the field."""
    kind = TYPES.get(failure.kind, "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": failure.message}}
