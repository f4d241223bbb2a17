"""Reads a JSON schema and rewrites it in the subset that the library enforces.

The library reads schemas, too, but leaves some demands out, reads a few differently from what the
schema means, and does not tell where it stopped. So each keyword is read here: enforced, an
annotation without a demand, or refused by name and place.

Invariants:
- A keyword that JSON Schema knows, in any draft from 4 to 2020-12, is never left out while it
  demands something. Keywords that no draft knows are annotations, as the specification has it.
- Only the parts that the root refers to are read.
- A value that a keyword does not take is an error with its place, not a guess.
- What is written demands at least what is read. Where the library would demand less, it is refused:
  numbers that it does not reckon with exactly, members counted whose names may be the same.
- Members come in the order of the keywords and of their members, so both are kept.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import combinations
from typing import Any, Final

from mlxd_worker.constraints import schema_values as values
from mlxd_worker.constraints.schema_overlap import are_constants, exclude, keep_from, negate
from mlxd_worker.constraints.schema_places import (
    DEPTH_MAX,
    Document,
    Draft,
    Json,
    Place,
    SchemaError,
)

Schema = dict[str, Any] | bool

_TRUE: Final[tuple[Schema, ...]] = (True, {})


def read_schema(text: str) -> dict[str, Any]:
    """Return the schema to be enforced, in draft 2020-12, its references under `$defs`.

    Raises:
        SchemaError: no JSON, no schema, or a demand that is not served; with the place.
    """
    document = Document(_parse(text))
    root = read_keywords(Place(document, "#", document.content))
    # Beside what it demands there is room for what its references need.
    result: dict[str, Any] = root if isinstance(root, dict) else {"allOf": [root]}
    written: dict[str, Any] = {}
    while document.waiting:
        name, place = document.waiting.popitem()
        written[name] = read_keywords(place)
    if written:
        result["$defs"] = written
    return result


def _parse(text: str) -> Json:
    try:
        value: Json = json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse_constant)
        json.dumps(value, ensure_ascii=False).encode()
    except SchemaError:  # which is a ValueError as well
        raise
    except json.JSONDecodeError as error:
        raise SchemaError(f"{error.lineno}:{error.colno}", f"not JSON: {error.msg}") from None
    except UnicodeEncodeError:
        raise SchemaError("#", "an escape of half a surrogate pair, which no text holds") from None
    except ValueError:
        digits = sys.get_int_max_str_digits()
        raise SchemaError("#", f"an integer of more than {digits} digits") from None
    except RecursionError:
        raise SchemaError("#", f"nested more than {DEPTH_MAX} deep") from None
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object; a name that stands there twice would be left out in silence."""
    result: dict[str, Any] = {}
    for name, value in pairs:
        if name in result:
            raise SchemaError("#", f"the name {name[:80]!r} occurs twice in one object")
        result[name] = value
    return result


def _refuse_constant(name: str) -> None:
    raise SchemaError("#", f"{name} is not a number of JSON")


def read_keywords(place: Place) -> Schema:
    """Return what the schema at a place demands; raises SchemaError."""
    if isinstance(place.content, bool):
        return place.content
    if not isinstance(place.content, dict):
        place.refuse("a schema is an object, true or false")
    return _Reader(place).read()


class _Reader:
    """Reads one schema, keyword by keyword, in their order."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._content: Mapping[str, Any] = place.content
        self._out: dict[str, Any] = {}
        self._also: list[Schema] = []
        """What has to hold besides."""

    def read(self) -> Schema:
        """Return what all keywords demand together."""
        if "$ref" in self._content and self._place.document.draft <= Draft.DRAFT_7:
            return {"$ref": self.reference("$ref", self._content["$ref"])}
        for keyword, value in self._content.items():
            if keyword in _VALUES:
                self._out[keyword] = _VALUES[keyword](self._place, keyword, value)
            elif keyword in _READERS:
                self._out[keyword] = _READERS[keyword](self, keyword, value)
            elif keyword in _WRITERS:
                _WRITERS[keyword](self, keyword, value)
        if self._also:
            self._out.setdefault("allOf", []).extend(self._also)
        return self._out

    def inner(self, value: Json, *path: str | int) -> Schema:
        return read_keywords(self._place.inner(value, *path))

    def reference(self, _: str, value: Json) -> str:
        return self._place.document.name_of(self._place, value)

    def schemas(self, keyword: str, value: Json) -> list[Schema]:
        items = enumerate(values.at_least_one(self._place, keyword, value))
        return [self.inner(item, keyword, index) for index, item in items]

    def one_of(self, keyword: str, value: Json) -> None:
        """Take oneOf: a choice, where options exclude each other or can be kept from others."""
        places = [
            self._place.inner(item, keyword, index)
            for index, item in enumerate(values.at_least_one(self._place, keyword, value))
        ]
        beside = {key: inner for key, inner in self._content.items() if key != keyword}
        here = replace(self._place, content=beside)
        apart: list[list[Schema]] = [[] for _ in places]
        pairs = combinations([] if are_constants(tuple(places)) else enumerate(places), 2)
        for (i, first), (j, second) in pairs:
            if not exclude((here, first), (here, second)):
                for index, mine, other in ((i, first, second), (j, second, first)):
                    # Written instead of the other part, this stands at its place.
                    instead = replace(other, content=keep_from(other, (here, mine)))
                    apart[index].append(read_keywords(instead))
        ways = [
            {"allOf": [option, *others]} if others else option
            for option, others in zip(map(read_keywords, places), apart, strict=True)
        ]
        self._also.append({"anyOf": ways})

    def negation(self, keyword: str, value: Json) -> None:
        self._also.append(self.inner(negate(self._place.inner(value, keyword)), keyword))

    def schema(self, keyword: str, value: Json) -> Schema:
        return self.inner(value, keyword)

    def members(self, keyword: str, value: Json) -> dict[str, Schema]:
        if not isinstance(value, dict):
            self._place.refuse("an object of schemas is needed", keyword)
        return {name: self.inner(item, keyword, name) for name, item in value.items()}

    def patterns(self, keyword: str, value: Json) -> dict[str, Schema]:
        written: dict[str, Schema] = {}
        for name, schema in self.members(keyword, value).items():
            pattern = values.pattern_at(self._place.inner(name, keyword, name), name)
            both = [written[pattern], schema] if pattern in written else []
            written[pattern] = {"allOf": both} if both else schema
        return written

    def members_least(self, keyword: str, value: Json) -> None:
        """Take minProperties: at most one more than those required, which is listed or not."""
        count, required, optional, is_open = self._members(keyword, value)
        if count - required > 1:  # two names may be the same, and then count once
            problem = "is served for at most one member more than those required"
            self._place.refuse(problem, keyword)
        if count - required < 1 or not optional or not is_open:
            self._out[keyword] = count
            return
        ways: list[Schema] = [{"type": ["object"], "required": [name]} for name in optional]
        absent = dict.fromkeys(optional, False)
        ways.append({"type": ["object"], "properties": absent, keyword: count})
        self._also.append({"anyOf": [*ways, {"type": [n for n in values.TYPES if n != "object"]}]})

    def members_most(self, keyword: str, value: Json) -> None:
        """Take maxProperties: one more than those required, or where none is listed besides."""
        count, required, optional, is_open = self._members(keyword, value)
        if not optional or (count - required == 1 and not is_open):
            self._out[keyword] = count
        elif is_open or count < len(optional) + required:
            problem = "is served on closed objects, for one member more than those required"
            self._place.refuse(problem, keyword)

    def _members(self, keyword: str, value: Json) -> tuple[int, int, list[str], bool]:
        """Return a count, how many members are required, those listed besides, if there are more.

        More than the listed ones: whether members with other names may be there.
        """
        content, names = self._content, self._content.get("properties")
        required = values.names(self._place, "required", content.get("required", []))
        optional = [n for n in names if n not in required] if isinstance(names, dict) else []
        is_closed = content.get("additionalProperties") is False
        is_open = not is_closed or bool(content.get("patternProperties"))
        return values.count(self._place, keyword, value), len(required), optional, is_open

    def items(self, keyword: str, value: Json) -> None:
        """Take items, of which a list is what prefixItems is since 2020-12."""
        is_list = isinstance(value, list)
        if "prefixItems" in self._content and (
            is_list or self._place.document.draft < Draft.DRAFT_2020_12
        ):  # what items means depends on whether prefixItems is a keyword
            self._place.refuse("is served with prefixItems only in schemas of 2020-12", keyword)
        if not is_list:
            self._out[keyword] = self.inner(value, keyword)
            return
        self._out["prefixItems"] = [
            self.inner(item, keyword, index) for index, item in enumerate(value)
        ]
        if "additionalItems" in self._content:
            rest = self._content["additionalItems"]
            self._out["items"] = self.inner(rest, "additionalItems")

    def exclusive(self, keyword: str, value: Json) -> None:
        """Take an exclusive bound; true, as in draft 4, makes the inclusive one exclusive."""
        inclusive = {"exclusiveMinimum": "minimum", "exclusiveMaximum": "maximum"}[keyword]
        if not isinstance(value, bool):
            self._out[keyword] = values.bound_of(self._place, keyword, value)
        elif value and inclusive in self._content:
            bound = values.bound_of(self._place, inclusive, self._content[inclusive])
            self._out[keyword] = bound

    def format(self, keyword: str, value: Json) -> None:
        demand = values.format_demand(self._place, keyword, value)
        if demand:
            self._also.append(demand)

    def dependencies(self, keyword: str, value: Json) -> None:
        """Take what a member demands where it is there: names, or a schema."""
        if not isinstance(value, dict):
            self._place.refuse("an object is needed", keyword)
        for name, wanted in value.items():
            demand: Json = {"required": wanted} if isinstance(wanted, list) else wanted
            there = {"type": ["object"], "required": [name]}
            absent: Schema = {"properties": {name: False}}
            ways = [absent, {"allOf": [there, self.inner(demand, keyword, name)]}]
            self._also.append({"anyOf": ways})

    def refuse(self, keyword: str, value: Json) -> None:
        """Refuse a keyword, unless this value of it demands nothing."""
        content = self._content
        match keyword:
            case "uniqueItems":
                is_void = value is False
            case "if":
                is_void = content.get("then", True) in _TRUE and content.get("else", True) in _TRUE
            case "contains":
                is_known = self._place.document.draft >= Draft.DRAFT_2019_09
                is_void = (
                    is_known and content.get("minContains") == 0 and "maxContains" not in content
                )
            case _:
                is_void = value in _TRUE
        if not is_void:
            self._place.refuse("is not served", keyword)


_VALUES: Final[Mapping[str, Callable[[Place, str, Json], Json]]] = {
    "type": values.types,
    "const": values.constant,
    "enum": values.constants,
    "required": values.names,
    "minItems": values.items_count,
    "maxItems": values.items_count,
    "minLength": values.count,
    "maxLength": values.count,
    "minimum": values.bound_of,
    "maximum": values.bound_of,
    "multipleOf": values.multiple,
    "pattern": values.pattern,
}
"""Keywords that stay what they are, and what checks the value."""
_READERS: Final[Mapping[str, Callable[[_Reader, str, Json], Json]]] = {
    "$ref": _Reader.reference,
    "allOf": _Reader.schemas,
    "anyOf": _Reader.schemas,
    "properties": _Reader.members,
    "patternProperties": _Reader.patterns,
    "additionalProperties": _Reader.schema,
    "prefixItems": _Reader.schemas,
}
"""Keywords that stay what they are too, of schemas that are read within."""
_WRITERS: Final[Mapping[str, Callable[[_Reader, str, Json], None]]] = {
    "items": _Reader.items,
    "format": _Reader.format,
    "minProperties": _Reader.members_least,
    "maxProperties": _Reader.members_most,
    "exclusiveMinimum": _Reader.exclusive,
    "exclusiveMaximum": _Reader.exclusive,
    "dependencies": _Reader.dependencies,
    "dependentRequired": _Reader.dependencies,
    "dependentSchemas": _Reader.dependencies,
    "oneOf": _Reader.one_of,
    "not": _Reader.negation,
    "if": _Reader.refuse,
    "contains": _Reader.refuse,
    "divisibleBy": _Reader.refuse,
    "uniqueItems": _Reader.refuse,
    "propertyNames": _Reader.refuse,
    "unevaluatedItems": _Reader.refuse,
    "unevaluatedProperties": _Reader.refuse,
    "$dynamicRef": _Reader.refuse,
    "$recursiveRef": _Reader.refuse,
}
"""Keywords that are written in other words, or not served."""
