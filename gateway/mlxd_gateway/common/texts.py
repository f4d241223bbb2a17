"""JSON that passes through a gateway as text: never looked into further than it must be."""

from __future__ import annotations

import json
from collections.abc import Mapping

import msgspec

from mlxd_gateway.common.failures import BadField


def join_objects(own: Mapping[str, object], given: msgspec.Raw | None, field: str) -> str:
    """Return the JSON object of both, of which `own` yields to `given`; empty where there is none.

    Raises:
        BadField: `given` is no object; names `field`.
    """
    if given is None or bytes(given) == b"null":
        return json.dumps(own) if own else ""
    if not own:
        return bytes(given).decode()
    value = msgspec.json.decode(given)
    if not isinstance(value, dict):
        raise BadField(field, "is no object")
    return json.dumps({**own, **value})


def raw_json(text: str) -> msgspec.Raw:
    """Return JSON text as a value that is written as it stands."""
    return msgspec.Raw(text.encode())
