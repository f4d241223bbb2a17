"""JSON that passes through a gateway as text: never looked into further than it must be."""

from __future__ import annotations

import json
from collections.abc import Mapping

import msgspec

from mlxd_gateway.common.failures import BadField


def json_of(raw: msgspec.Raw) -> str:
    """Return the JSON of a field, as it was sent; empty where there is none, or null."""
    text = bytes(raw).decode()
    return "" if text == "null" else text


def join_objects(own: Mapping[str, object], sent: msgspec.Raw, field: str) -> str:
    """Return the JSON object of both, of which `own` yields to `sent`; empty where there is none.

    Raises:
        BadField: `sent` is no object, or has what cannot be read; names `field`.
    """
    text = json_of(sent)
    if not text:
        return json.dumps(own) if own else ""
    if not own:
        return text
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise BadField(field, f"cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise BadField(field, "is no object")
    return json.dumps({**own, **value})


def raw_json(text: str) -> msgspec.Raw:
    """Return JSON text as a value that is written as it stands."""
    return msgspec.Raw(text.encode())
