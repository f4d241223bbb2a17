"""The tools on offer, and their arguments where a dialect writes these one by one.

Then strings are bare, and everything else is JSON.

Invariants:
- A parameter that is a string and nothing else is bare text up to the mark behind it, so of what
  a strict schema may demand of it constants alone are served. All others are JSON.
- Strict arguments come in the order of the schema. Without a schema they come as the model likes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NoReturn

from mlxd_shared.domain.chats import json_object
from mlxd_shared.domain.errors import InvalidRequest
from mlxd_worker.constraints.calls.lark import Rules, any_of
from mlxd_worker.constraints.schema_keywords import read_schema
from mlxd_worker.constraints.schema_places import SchemaError
from mlxd_worker.engine.masks.limits import REASON_CHARS_MAX

_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}
_UNWRITABLE: Final = re.compile(r"[\s<>\[\]{}\":=]")
_SERVED: Final = {"type", "properties", "required", "additionalProperties", "$defs"}
"""What may be demanded of arguments that are written one by one."""
_ANY: Final[dict[str, Any]] = {}


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


def refuse_names(offers: Iterable[Offer]) -> None:
    """Refuse tools whose names no call can hold.

    Raises:
        InvalidRequest: naming the tool's field.
    """
    for offer in offers:
        if not offer.name or _UNWRITABLE.search(offer.name):
            _refuse(offer, f"this model's calls cannot hold the name {offer.name[:80]!r}")


def write_members(
    rules: Rules,
    offer: Offer,
    *,
    begin: Callable[[str], str],
    begin_any: str,
    line: bool,
    end: str,
    without: str = "",
    text_sign: str = "",
    json_sign: str = "",
) -> str:
    """Return a tool's arguments, with blanks behind each.

    begin: what a parameter begins with, by its name; begin_any: likewise, whatever its name. line:
    whether a value has a line of its own. end, without: the mark behind a value, and one that no
    text holds. text_sign, json_sign: what tells text from JSON, before it.

    Raises:
        InvalidRequest: a demand that is not served of bare arguments; names the tool's field.
    """
    text = f"{rules.text(text_sign)} {rules.up_to(end, without=without)}"
    if offer.schema is None:
        values = [text]
        if json_sign:
            values.append(f"{rules.text(json_sign)} {rules.json(_ANY)} {rules.text(end)}")
        return f"({begin_any} {any_of(values)} {rules.blanks})*"
    schema = offer.schema
    unserved = next((word for word in schema if word not in _SERVED), None)
    if unserved is not None:
        _refuse(offer, f"parameters: {unserved!r} is not served of arguments one by one")
    breaks = rules.text("\n") if line else ""
    parts = []
    for name, inner in schema.get("properties", {}).items():
        if _UNWRITABLE.search(name):
            _refuse(offer, f"this model's calls cannot hold the parameter {name[:80]!r}")
        if name not in offer.texts:
            own = inner if isinstance(inner, dict) else {"allOf": [inner]}
            whole = {**own, "$defs": schema.get("$defs", {})}
            value = f"{breaks} {rules.json(whole)} {breaks} {rules.text(end)}"
            value = f"{rules.text(json_sign)} {value}"
        else:
            constants = _constants(offer, name, inner)
            value = text
            if constants is not None:
                ways = any_of(f"{rules.text(constant)}" or '""' for constant in constants)
                value = f"{rules.text(text_sign)} {breaks} {ways} {breaks} {rules.text(end)}"
        part = rules.rule(f"{begin(name)} {value} {rules.blanks}")
        parts.append(part if name in schema.get("required", ()) else f"({part})?")
    return " ".join(parts)


def _constants(offer: Offer, name: str, schema: dict[str, Any]) -> list[str] | None:
    """Return the texts that a string may be; None where it may be any."""
    unserved = next((word for word in schema if word not in ("type", "enum", "const")), None)
    if unserved is not None:
        place = f"parameters: #/properties/{name}"
        _refuse(offer, f"{place}: {unserved!r} is not served of a text that is written bare")
    listed = [schema["const"]] if "const" in schema else schema.get("enum")
    return None if listed is None else [value for value in listed if isinstance(value, str)]


def _refuse(offer: Offer, problem: str) -> NoReturn:
    raise InvalidRequest.of(offer.field, problem)
