"""Failures in the shape of Ollama's API."""

from __future__ import annotations

from typing import Any

from mlxd_gateway.common.failures import Failure


def error_body(failure: Failure) -> dict[str, Any]:
    """Return the body of an error; its message begins with the field."""
    return {"error": failure.message}
