"""Failures as the page reads them."""

from __future__ import annotations

from typing import Any

from mlxd_gateway.common.failures import Failure


def error_body(failure: Failure) -> dict[str, Any]:
    """Return the body of an error: its kind, a sentence, and the field where there is one."""
    return {
        "error": {
            "kind": failure.kind.name.lower(),
            "message": failure.message,
            "field": failure.field or None,
        }
    }
