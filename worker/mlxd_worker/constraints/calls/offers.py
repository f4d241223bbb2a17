"""The tools on offer, as a grammar of their calls needs them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mlxd_shared.domain.chats import json_object
from mlxd_shared.domain.errors import InvalidRequest
from mlxd_worker.constraints.schema_keywords import read_schema
from mlxd_worker.constraints.schema_places import SchemaError
from mlxd_worker.engine.masks.limits import REASON_CHARS_MAX

_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True, slots=True)
class Offer:
    """A function on offer."""

    name: str
    field: str
    """What it is called on the wire."""
    schema: dict[str, Any] | None = None
    """What its arguments match, as `read_schema` returns it; None: any object."""
    texts: frozenset[str] = frozenset()
    """The parameters that are strings and nothing else."""


def read_offers(tools_json: Sequence[str], *, name: str = "") -> tuple[Offer, ...]:
    """Return the functions among tools, JSON objects each; only those of `name` where it is given.

    Raises:
        InvalidRequest: one is strict, and its parameters are not served; with field and place.
    """
    offers = []
    for index, text in enumerate(tools_json):
        function = json_object(text)
        function = function.get("function", function)
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            continue  # of another kind than a function
        if name in ("", function["name"]):
            offers.append(_read_offer(function, f"chat.tools_json[{index}]"))
    return tuple(offers)


def _read_offer(function: dict[str, Any], field: str) -> Offer:
    name = function["name"]
    if function.get("strict") is not True:
        return Offer(name, field)
    parameters = function.get("parameters") or _NO_ARGUMENTS
    if not isinstance(parameters, dict) or parameters.get("type", "object") != "object":
        raise InvalidRequest.of(field, "parameters that are strict must describe an object")
    try:
        schema = read_schema(json.dumps({**parameters, "type": "object"}))
    except SchemaError as error:
        raise InvalidRequest.of(field, f"parameters: {error}"[:REASON_CHARS_MAX]) from None
    except RecursionError:
        raise InvalidRequest.of(field, "parameters: nested too deep") from None
    properties = parameters.get("properties")
    texts = frozenset(
        name
        for name, inner in (properties if isinstance(properties, dict) else {}).items()
        if isinstance(inner, dict) and inner.get("type") == "string"
    )
    return Offer(name, field, schema, texts)
