"""Failures in the shapes of Cohere's API and of Jina's."""

from __future__ import annotations

from typing import Any

from mlxd_gateway.common.failures import Failure


def error_body(failure: Failure) -> dict[str, Any]:
    """Return the body of an error; its message begins with the field.

    Cohere's clients read it as `message`, Jina's as `detail`.
    """
    return {"message": failure.message, "detail": failure.message}
