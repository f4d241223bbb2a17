"""Whether two parts of a schema exclude each other, and what a value is that does not match one.

Invariants:
- `exclude` says yes only where no value matches both; `negate` writes exactly the values that do
  not match, or refuses. Both look at a few keywords alone, those of most real schemas.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator
from typing import Any, Final

from mlxd_worker.constraints.schema_places import Draft, Json, Place
from mlxd_worker.constraints.schema_values import names
from mlxd_worker.constraints.schema_values import types as read_types

LEVELS: Final = 4
"""How deep members, items and alternatives are looked into."""
KINDS: Final = frozenset({"null", "boolean", "number", "string", "array", "object"})
_CLASSES: Final = {bool: "boolean", int: "number", float: "number", str: "string", list: "array"}
_SILENT: Final = frozenset(
    {"$comment", "$schema", "$defs", "definitions", "title", "description", "default", "examples"}
)
_Parts = tuple[Place, ...]


def exclude(first: _Parts, second: _Parts, levels: int = LEVELS) -> bool:
    """Tell whether it is seen that no value matches all parts of both; raises SchemaError."""
    for place in (*first, *second)[:1]:
        place.document.count(place.pointer)
    one, other = tuple(_flat(first)), tuple(_flat(second))
    values = _constants(one), _constants(other)
    if None not in values and not values[0].keys() & values[1].keys():  # type: ignore[union-attr]
        return True
    both = _kinds(one) & _kinds(other)
    if all(_apart(kind, one, other, levels) for kind in both):
        return True
    return levels > 0 and (_split(one, second, levels) or _split(other, first, levels))


def are_constants(places: _Parts) -> bool:
    """Tell whether all parts list values, and none is listed twice."""
    plain = [p for p in places if isinstance(p.content, dict) and "$ref" not in p.content]
    lists = [_constants((place,)) for place in plain]
    keys = [key for values in lists for key in values or ()]
    return len(lists) == len(places) and None not in lists and len(set(keys)) == len(keys)


def negate(place: Place) -> Json:
    """Return a schema of the values that do not match a part; raises SchemaError for many."""
    content = place.content
    if isinstance(content, bool):
        return not content
    if not isinstance(content, dict):
        place.refuse("a schema is an object, true or false")
    written: Json = None
    match {key: value for key, value in content.items() if key not in _SILENT}:
        case {"$ref": reference, **rest} if not rest:
            target = place.document.target(place, reference)
            written = negate(place.inner(target.content, "$ref"))
        case {"required": [_, *_] as listed, **rest} if not rest:
            absent = [{"properties": {n: False}} for n in names(place, "required", listed)]
            written = {"type": "object", "anyOf": absent}
        case {"type": str() | list() as types, **rest} if not rest and "integer" not in types:
            left = sorted(KINDS - set(read_types(place, "type", types)))
            written = {"type": left} if left else False
        case {"not": inner, **rest} if not rest:
            written = inner
        case {"anyOf": list(), **rest} if not rest:
            written = {"allOf": [negate(option) for option in place.list_places("anyOf")]}
        case {**rest} if not rest:
            written = False
    if written is None:
        place.refuse("is not served under not")
    return written


def keep_from(place: Place, others: tuple[Place, ...]) -> Json:
    """Return a schema, like the user's own, of values of a part that do not match another one.

    They are of other kinds, or lack a member that the other part requires; a value is left out
    that matches the other part not for another reason.

    Raises:
        SchemaError: there are none.
    """
    one, other = tuple(_flat(others)), tuple(_flat((place,)))
    ways: list[Json] = [
        {"type": "object", "properties": {name: False}}
        for name in sorted(_required_names(other) - _required_names(one))
    ]
    if kinds := sorted(_kinds(one) - _kinds(other)):
        ways.append({"type": kinds})
    return {"anyOf": ways} if ways else place.refuse("is not seen to exclude another option")


def key_of(value: Json) -> Hashable:
    """Return what is the same for values of JSON that are equal: 1 and 1.0 are, 1 and true not."""
    if isinstance(value, dict):
        return dict, frozenset((name, key_of(member)) for name, member in value.items())
    if isinstance(value, list):
        return list, tuple(map(key_of, value))
    return isinstance(value, bool), value


def _flat(places: _Parts) -> Iterator[Place]:
    """Yield all parts that have to match, references followed and `allOf` taken apart."""
    todo, seen = list(places), set()
    while todo:
        place = todo.pop()
        content = place.content
        if place.pointer in seen:
            continue
        seen.add(place.pointer)
        if content is False:
            yield Place(place.document, place.pointer, {"enum": []})
        if not isinstance(content, dict):
            continue
        if "$ref" in content:
            place.document.count(place.pointer)
            todo.append(place.document.target(place, content["$ref"]))
            if place.document.draft <= Draft.DRAFT_7:
                continue
        yield place
        todo += place.list_places("allOf")


def _constants(parts: _Parts) -> dict[Hashable, Json] | None:
    """Return the values that are listed for all parts together; None where none are."""
    result: dict[Hashable, Json] | None = None
    for part in parts:
        lists = [part.content.get("enum")]
        if "const" in part.content and part.document.draft > Draft.DRAFT_4:
            lists.append([part.content["const"]])
        for values in lists:
            if isinstance(values, list):
                keyed = {key_of(value): value for value in values}
                known = keyed if result is None else result
                result = {key: known[key] for key in known.keys() & keyed.keys()}
    return result


def _kinds(parts: _Parts) -> frozenset[str]:
    """Return the kinds that a value may be of."""
    kinds = KINDS
    for part in parts:
        types = part.content.get("type", list(KINDS))
        names = [types] if isinstance(types, str) else types if isinstance(types, list) else KINDS
        kinds &= {"number" if name == "integer" else name for name in map(str, names)}
    listed = _constants(parts)
    return kinds if listed is None else kinds & {_kind_of(v) for v in listed.values()}


def _kind_of(value: Json) -> str:
    return "null" if value is None else _CLASSES.get(type(value), "object")


def _apart(kind: str, one: _Parts, other: _Parts, levels: int) -> bool:
    """Tell whether no value of a kind matches both."""
    match kind:
        case "number":
            return _disjoint(one, other, "minimum", "maximum")
        case "string":
            return _disjoint(one, other, "minLength", "maxLength")
        case "array":
            if _disjoint(one, other, "minItems", "maxItems"):
                return True
            least = max(_bounds(one, "minItems") + _bounds(other, "minItems"), default=0)
            items = tuple(_items(one)), tuple(_items(other))
            return levels > 0 and least > 0 and exclude(*items, levels - 1)
        case "object" if levels > 0:
            names = sorted(_required_names(one) | _required_names(other))
            return any(
                exclude(tuple(_member(one, n)), tuple(_member(other, n)), levels - 1) for n in names
            )
    return False


def _split(parts: _Parts, other: _Parts, levels: int) -> bool:
    """Tell whether all alternatives of some part exclude others."""
    for part in parts:
        for keyword in ("anyOf", "oneOf"):
            options = part.list_places(keyword)
            rest = tuple(p for p in parts if p is not part)
            if options and all(exclude((*rest, o), other, levels - 1) for o in options):
                return True
    return False


def _disjoint(one: _Parts, other: _Parts, low: str, high: str) -> bool:
    """Tell whether the bounds of both leave nothing between them."""
    least = max(_bounds(one, low) + _bounds(other, low), default=-math.inf)
    return least > min(_bounds(one, high) + _bounds(other, high), default=math.inf)


def _bounds(parts: _Parts, keyword: str) -> list[Any]:
    bounds = [part.content.get(keyword) for part in parts]
    return [v for v in bounds if isinstance(v, int | float) and not isinstance(v, bool)]


def _required_names(parts: _Parts) -> set[str]:
    lists = [part.content.get("required") for part in parts]
    return {n for names in lists if isinstance(names, list) for n in names if isinstance(n, str)}


def _member(parts: _Parts, name: str) -> Iterator[Place]:
    """Yield what the parts demand of one member of an object, but for patterns of names."""
    for part in parts:
        members, rest = part.content.get("properties"), part.content.get("additionalProperties")
        if isinstance(members, dict) and name in members:
            yield part.inner(members[name], "properties", name)
        elif rest is not None and not part.content.get("patternProperties"):
            yield part.inner(rest, "additionalProperties")


def _items(parts: _Parts) -> Iterator[Place]:
    """Yield what the parts demand of each item of a list, where all are alike."""
    for part in parts:
        if isinstance(part.content.get("items"), dict | bool) and "prefixItems" not in part.content:
            yield part.inner(part.content["items"], "items")
