"""Whether a constant matches a part of a schema: exactly, or not told at all.

Constants are few and known when a schema is read, so whatever JSON Schema demands of them can be
looked at, also what no mask enforces.

Invariants:
- An answer is what the specification says of the draft; where that is not known here, such as of
  a format, the place is refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping
from fractions import Fraction
from typing import Any, Final

from mlxd_worker.constraints import schema_values as values
from mlxd_worker.constraints.pattern_reader import PatternError
from mlxd_worker.constraints.schema_places import Draft, Json, Place, SchemaError
from mlxd_worker.constraints.schema_values import INTEGER_FORMATS, KNOWN_FORMATS

CONSTANTS_AT_ONCE: Final = 50
"""So many take about as long as one part."""
_SINCE: Final = {
    "const": Draft.DRAFT_6,
    "contains": Draft.DRAFT_6,
    "propertyNames": Draft.DRAFT_6,
    "if": Draft.DRAFT_7,
    "dependentRequired": Draft.DRAFT_2019_09,
    "dependentSchemas": Draft.DRAFT_2019_09,
    "unevaluatedItems": Draft.DRAFT_2019_09,
    "unevaluatedProperties": Draft.DRAFT_2019_09,
    "prefixItems": Draft.DRAFT_2020_12,
}
"""Keywords of later drafts: before, they demand nothing, whatever is enforced of them."""
_Class = type | tuple[type, ...]
_CLASSES: Final[Mapping[str, _Class]] = {
    "null": type(None),
    "string": str,
    "array": list,
    "object": dict,
    "number": (int, float),
}
"""What the values of a type are in Python, where true is an integer, too."""


def check_known(place: Place, keyword: str) -> None:
    """Refuse a keyword that the schema's draft does not know, where it has to be exact."""
    if place.document.draft < _SINCE.get(keyword, Draft.DRAFT_4):
        place.refuse("is not of the draft that the schema names", keyword)


def key_of(value: Json) -> Hashable:
    """Return what is the same for values of JSON that are equal: 1 and 1.0 are, 1 and true not."""
    if isinstance(value, dict):
        return dict, frozenset((name, key_of(member)) for name, member in value.items())
    if isinstance(value, list):
        return list, tuple(map(key_of, value))
    return isinstance(value, bool), value


def same(first: Json, second: Json) -> bool:
    """Tell whether two values of JSON are equal: 1 and 1.0 are, 1 and true are not."""
    if isinstance(first, bool) or isinstance(second, bool):
        return first is second
    if isinstance(first, list) and isinstance(second, list):
        return len(first) == len(second) and all(map(same, first, second))
    if isinstance(first, dict) and isinstance(second, dict):
        return first.keys() == second.keys() and all(same(first[k], second[k]) for k in first)
    if isinstance(first, list | dict) or isinstance(second, list | dict):
        return False
    return bool(first == second)


def is_of_type(value: Json, name: str, draft: Draft) -> bool:
    """Tell whether a value is of a type; since draft 6, 1.0 is an integer."""
    if name in _CLASSES:
        return isinstance(value, _CLASSES[name]) and not isinstance(value, bool)
    if name == "boolean":
        return isinstance(value, bool)
    whole = isinstance(value, float) and value.is_integer() and draft > Draft.DRAFT_4
    return (isinstance(value, int) and not isinstance(value, bool)) or whole


def holds(place: Place, value: Json) -> bool:
    """Tell whether a value matches the schema at a place.

    Raises:
        SchemaError: it makes no sense, or is not known.
    """
    place.document.count(place.pointer)
    content = place.content
    if isinstance(content, bool):
        return content
    if not isinstance(content, dict):
        place.refuse("a schema is an object, true or false")
    if "$ref" in content and place.document.draft <= Draft.DRAFT_7:
        return holds(place.document.target(place, content["$ref"]), value)
    return all(_holds(place, keyword, wanted, value) for keyword, wanted in content.items())


def _holds(place: Place, keyword: str, wanted: Json, value: Json) -> bool:
    for kind, checks in _CHECKS.items():
        if keyword in checks and isinstance(value, kind) and _is_kind(value, kind):
            check_known(place, keyword)
            try:
                return checks[keyword](place, wanted, value)
            except SchemaError:
                raise
            except (TypeError, ValueError, AttributeError, OverflowError):
                place.refuse("a value that it does not take", keyword)
    if keyword in ("unevaluatedItems", "unevaluatedProperties") and wanted not in (True, {}):
        place.refuse("is not served", keyword)
    if keyword in ("$dynamicRef", "$recursiveRef"):
        place.refuse("is not served", keyword)
    return True


def _is_kind(value: Json, kind: _Class) -> bool:
    return kind is object or not isinstance(value, bool)


def _inner(place: Place, value: Json, content: Json, *path: str | int) -> bool:
    return holds(place.inner(content, *path), value)


def _count(place: Place, value: Json, wanted: Iterable[Json], keyword: str) -> int:
    return sum(_inner(place, value, inner, keyword, i) for i, inner in enumerate(wanted))


def _found(place: Place, pattern: str, text: str, keyword: str) -> bool:
    try:
        return place.document.patterns.is_found(pattern, text)
    except PatternError as error:
        place.refuse(str(error), keyword)


def _format(place: Place, wanted: Json, value: Json) -> bool:
    if wanted in (KNOWN_FORMATS if isinstance(value, str) else INTEGER_FORMATS):
        place.refuse("is served only where nothing depends on what does not match it", "format")
    return True


def _condition(place: Place, wanted: Json, value: Json) -> bool:
    branch = "then" if _inner(place, value, wanted, "if") else "else"
    return _inner(place, value, place.content.get(branch, True), branch)


def _multiple(_: Place, wanted: Json, value: Json) -> bool:
    return (Fraction(repr(value)) / Fraction(repr(wanted))).denominator == 1


def _exclusive(place: Place, wanted: Json, value: Json, *, least: bool) -> bool:
    """Tell whether an exclusive bound holds; in draft 4 it is a flag of the inclusive one."""
    if isinstance(wanted, bool):
        bound = place.content.get("minimum" if least else "maximum")
        return not wanted or bound is None or bool(value > bound if least else value < bound)
    return bool(value > wanted if least else value < wanted)


def _items(place: Place, wanted: Json, value: list[Json]) -> bool:
    if isinstance(wanted, list):
        rest = place.content.get("additionalItems", True)
        inner = [*wanted, *[rest] * (len(value) - len(wanted))]
        pairs = enumerate(zip(value, inner, strict=False))
        return all(_inner(place, v, s, "items", i) for i, (v, s) in pairs)
    listed = place.content.get("prefixItems", ())
    return all(_inner(place, item, wanted, "items") for item in value[len(listed) :])


def _prefix(place: Place, wanted: Json, value: list[Json]) -> bool:
    pairs = enumerate(zip(value, wanted, strict=False))
    return all(_inner(place, v, s, "prefixItems", i) for i, (v, s) in pairs)


def _contains(place: Place, wanted: Json, value: list[Json]) -> bool:
    found = sum(_inner(place, item, wanted, "contains") for item in value)
    since = place.document.draft >= Draft.DRAFT_2019_09
    least = place.content.get("minContains", 1) if since else 1
    most = place.content.get("maxContains", math.inf) if since else math.inf
    return bool(least <= found <= most)


def _unique(_: Place, wanted: Json, value: list[Json]) -> bool:
    return not wanted or len(set(map(key_of, value))) == len(value)


def _listed(place: Place, wanted: list[Json], value: Json) -> bool:
    place.document.count(place.pointer, len(wanted) // CONSTANTS_AT_ONCE)
    return any(same(item, value) for item in wanted)


def _members(place: Place, wanted: Json, value: dict[str, Json]) -> bool:
    return all(_inner(place, value[n], s, "properties", n) for n, s in wanted.items() if n in value)


def _patterned(place: Place, wanted: Json, value: dict[str, Json]) -> bool:
    return all(
        _inner(place, member, schema, "patternProperties", pattern)
        for pattern, schema in wanted.items()
        for name, member in value.items()
        if _found(place, pattern, name, "patternProperties")
    )


def _additional(place: Place, wanted: Json, value: dict[str, Json]) -> bool:
    patterns = place.content.get("patternProperties", {})
    return all(
        _inner(place, member, wanted, "additionalProperties")
        for name, member in value.items()
        if name not in place.content.get("properties", {})
        and not any(_found(place, p, name, "patternProperties") for p in patterns)
    )


def _dependencies(place: Place, wanted: Json, value: dict[str, Json]) -> bool:
    return all(
        set(demand) <= value.keys()
        if isinstance(demand, list)
        else _inner(place, value, demand, "dependencies", name)
        for name, demand in wanted.items()
        if name in value
    )


_Check = Callable[[Place, Any, Any], bool]
_CHECKS: Final[Mapping[_Class, Mapping[str, _Check]]] = {
    object: {
        "$ref": lambda place, wanted, value: holds(place.document.target(place, wanted), value),
        "type": lambda place, wanted, value: any(
            is_of_type(value, name, place.document.draft)
            for name in values.types(place, "type", wanted)
        ),
        "const": lambda _, wanted, value: same(wanted, value),
        "enum": _listed,
        "allOf": lambda place, wanted, value: _count(place, value, wanted, "allOf") == len(wanted),
        "anyOf": lambda place, wanted, value: _count(place, value, wanted, "anyOf") > 0,
        "oneOf": lambda place, wanted, value: _count(place, value, wanted, "oneOf") == 1,
        "not": lambda place, wanted, value: not _inner(place, value, wanted, "not"),
        "if": _condition,
    },
    str: {
        "minLength": lambda _, wanted, value: len(value) >= wanted,
        "maxLength": lambda _, wanted, value: len(value) <= wanted,
        "pattern": lambda place, wanted, value: _found(place, wanted, value, "pattern"),
        "format": _format,
    },
    (int, float): {
        "minimum": lambda _, wanted, value: value >= wanted,
        "maximum": lambda _, wanted, value: value <= wanted,
        "exclusiveMinimum": lambda *args: _exclusive(*args, least=True),
        "exclusiveMaximum": lambda *args: _exclusive(*args, least=False),
        "multipleOf": _multiple,
        "format": _format,
    },
    list: {
        "items": _items,
        "prefixItems": _prefix,
        "minItems": lambda _, wanted, value: len(value) >= wanted,
        "maxItems": lambda _, wanted, value: len(value) <= wanted,
        "contains": _contains,
        "uniqueItems": _unique,
    },
    dict: {
        "properties": _members,
        "patternProperties": _patterned,
        "additionalProperties": _additional,
        "required": lambda _, wanted, value: set(wanted) <= value.keys(),
        "minProperties": lambda _, wanted, value: len(value) >= wanted,
        "maxProperties": lambda _, wanted, value: len(value) <= wanted,
        "propertyNames": lambda place, wanted, value: all(
            _inner(place, name, wanted, "propertyNames") for name in value
        ),
        "dependencies": _dependencies,
        "dependentRequired": _dependencies,
        "dependentSchemas": _dependencies,
    },
}
"""What each keyword demands of values of each kind."""
