"""Failures in the shape of OpenAI's API."""

from __future__ import annotations

from typing import Any

from mlxd_gateway.common.failures import Failure, FailureKind

TYPES = {
    FailureKind.UNAUTHENTICATED: ("authentication_error", "invalid_api_key"),
    FailureKind.FORBIDDEN: ("permission_error", "forbidden"),
    FailureKind.NOT_FOUND: ("invalid_request_error", "not_found"),
    FailureKind.BUSY: ("rate_limit_error", "busy"),
    FailureKind.BUG: ("server_error", "internal_error"),
    FailureKind.BROKEN: ("server_error", "broken"),
    FailureKind.UNAVAILABLE: ("server_error", "unavailable"),
    FailureKind.LATE: ("server_error", "timeout"),
}
_OTHERS = ("invalid_request_error", None)


def error_body(failure: Failure) -> dict[str, Any]:
    """Return the body of an error; `param` is the field."""
    kind, code = TYPES.get(failure.kind, _OTHERS)
    if failure.kind is FailureKind.NOT_FOUND and failure.field == "model":
        code = "model_not_found"
    error = {"message": failure.message, "type": kind, "param": failure.field or None, "code": code}
    return {"error": error}
