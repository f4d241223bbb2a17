"""Failures as the page reads them."""

from __future__ import annotations

from typing import Any

from mlxd_gateway.common.failures import Failure

_NAMES = {"grace": "grace_s", "interval": "interval_s"}


def rename(wire: str) -> str:
    """Return the name that a field of the wire's has in the page's requests."""
    field = wire.removeprefix("options.")
    return _NAMES.get(field, field)


def error_body(failure: Failure) -> dict[str, Any]:
    """Return the body of an error: its kind, a sentence, and the field where there is one."""
    return {
        "error": {
            "kind": failure.kind.name.lower(),
            "message": failure.message,
            "field": failure.field or None,
        }
    }
