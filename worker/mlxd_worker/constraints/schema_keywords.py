"""What each keyword of JSON Schema demands, written in the subset that the library enforces.

Invariants:
- A value that a keyword does not take is an error with its place, not a guess.
- What is written demands at least what is read. Where the library would demand less, it is refused:
  numbers that it does not reckon with exactly, members counted whose names may be the same.
- Members come in the order of the keywords and of their members, so both are kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property
from itertools import combinations
from typing import Any, Final

from mlxd_worker.constraints import schema_values as values
from mlxd_worker.constraints.schema_check import holds
from mlxd_worker.constraints.schema_facts import Facts
from mlxd_worker.constraints.schema_negation import negated
from mlxd_worker.constraints.schema_places import Draft, Json, Place
from mlxd_worker.constraints.schema_writing import of_kinds

Schema = dict[str, Any] | bool
CHOICES_MAX: Final = 100
"""Of members, where so many of them are to be there, or not to be."""

_TRUE: Final[tuple[Schema, ...]] = (True, {})


def read_keywords(place: Place, context: tuple[Place, ...] = ()) -> Schema:
    """Return what the schema at a place demands.

    context: what its values have to match besides, which is read elsewhere.

    Raises:
        SchemaError: it makes no sense, or is not served.
    """
    if isinstance(place.content, bool):
        return place.content
    if not isinstance(place.content, dict):
        place.refuse("a schema is an object, true or false")
    return _Reader(place, context).read()


class _Reader:
    """Reads one schema, keyword by keyword, in their order."""

    def __init__(self, place: Place, context: tuple[Place, ...]) -> None:
        self._place = place
        self._here = (*context, place)
        self._content: Mapping[str, Any] = place.content
        self._out: dict[str, Any] = {}
        self._also: list[Schema] = []
        """What has to hold besides."""

    def read(self) -> Schema:
        """Return what all keywords demand together."""
        if "$ref" in self._content and self._place.document.draft <= Draft.DRAFT_7:
            return {"$ref": self.reference("$ref", self._content["$ref"])}
        for keyword, value in self._content.items():
            if keyword in _READERS:
                self._out[keyword] = _READERS[keyword](self, keyword, value)
            elif keyword in _WRITERS:
                _WRITERS[keyword](self, keyword, value)
        if self._also:
            self._out.setdefault("allOf", []).extend(self._also)
        return self._out

    @cached_property
    def _facts(self) -> Facts:
        return Facts(self._here)

    def inner(self, value: Json, *path: str | int) -> Schema:
        return read_keywords(self._place.inner(value, *path))

    def same(self, value: Json, *path: str | int) -> Schema:
        """Return what a part demands of the very same values."""
        return read_keywords(self._place.inner(value, *path), self._here)

    def reference(self, keyword: str, value: Json) -> str:
        if not isinstance(value, str):
            self._place.refuse("a reference is a text", keyword)
        if self._place.document.leads_back(self._place):
            self._place.refuse("leads back to itself, and to nothing else", keyword)
        return self._place.document.name_of(self._place, value)

    def types(self, keyword: str, value: Json) -> list[str]:
        return values.types(self._place, keyword, value)

    def constant(self, keyword: str, value: Json) -> Json:
        values.check_exact(self._place, value, keyword)
        return value

    def options(self, keyword: str, value: Json) -> list[Json]:
        if not isinstance(value, list) or not value:
            self._place.refuse("a list of at least one value is needed", keyword)
        return [self.constant(keyword, item) for item in value]

    def schemas(self, keyword: str, value: Json) -> list[Schema]:
        if not isinstance(value, list) or not value:
            self._place.refuse("a list of at least one schema is needed", keyword)
        read = self.inner if keyword == "prefixItems" else self.same
        return [read(item, keyword, index) for index, item in enumerate(value)]

    def one_of(self, keyword: str, value: Json) -> None:
        """Take oneOf: a choice, each option without what another one matches as well.

        A value may be left out that matches one option, and no other for a reason that no mask can
        tell, such as a number that is no integer.
        """
        if not isinstance(value, list) or not value:
            self._place.refuse("a list of at least one schema is needed", keyword)
        if self._facts.listed is not None:
            self._filter()
            return
        places = [self._place.inner(item, keyword, index) for index, item in enumerate(value)]
        options: list[Schema] = []
        beside = {key: inner for key, inner in self._content.items() if key != keyword}
        here = (*self._here[:-1], replace(self._place, content=beside))
        facts = [Facts((*here, place)) for place in places]
        for index, (place, mine) in enumerate(zip(places, facts, strict=True)):
            others = [
                other
                for i, (other, its) in enumerate(zip(places, facts, strict=True))
                if i != index and not mine.excludes(its)
            ]
            apart = [negated(other, mine, exact=False) for other in others]
            if False not in [way for way in apart if isinstance(way, bool)]:
                ways = [way for way in apart if way is not True]
                parts = [
                    read_keywords(self._place.inner(way, keyword, index), here) for way in ways
                ]
                option = read_keywords(place, here)
                options.append({"allOf": [option, *parts]} if parts else option)
        self._also.append({"anyOf": options} if options else False)

    def negation(self, keyword: str, value: Json) -> None:
        """Take not."""
        found = negated(self._place.inner(value, keyword), self._facts, exact=True)
        if found is not True:
            self._also.append(self.same(found, keyword))

    def condition(self, keyword: str, value: Json) -> None:
        """Take if, then and else: either the condition and then, or its opposite and else."""
        if _demands_nothing(keyword, value, self._content):
            return
        if self._facts.listed is not None:
            self._filter()
            return
        wanted = self._place.inner(value, keyword)
        opposite = negated(wanted, self._facts, exact=False)
        ways = [
            {"allOf": [value, self._content.get("then", True)]},
            {"allOf": [opposite, self._content.get("else", True)]},
        ]
        self._also.append({"anyOf": [self.same(way, keyword) for way in ways]})

    def _filter(self) -> None:
        """Leave of the constants that a value may be those that match all of this part."""
        listed = self._facts.listed or []
        found = [value for value in listed if holds(self._place, value)]
        if len(found) < len(listed):
            self._also.append({"enum": found} if found else False)

    def schema(self, keyword: str, value: Json) -> Schema:
        return self.inner(value, keyword)

    def members(self, keyword: str, value: Json) -> dict[str, Schema]:
        if not isinstance(value, dict):
            self._place.refuse("an object of schemas is needed", keyword)
        return {name: self.inner(item, keyword, name) for name, item in value.items()}

    def patterns(self, keyword: str, value: Json) -> dict[str, Schema]:
        found: dict[str, Schema] = {}
        for name, schema in self.members(keyword, value).items():
            place = self._place.inner(name, keyword, name)
            exact = self._content.get("additionalProperties") is not False
            pattern = values.pattern(place, name, exact=exact)
            found[pattern] = {"allOf": [found[pattern], schema]} if pattern in found else schema
        return found

    def required(self, keyword: str, value: Json) -> list[str]:
        return values.names(self._place, keyword, value)

    def count(self, keyword: str, value: Json) -> int:
        return values.count(self._place, keyword, value)

    def items_count(self, keyword: str, value: Json) -> int:
        found = self.count(keyword, value)
        if found > values.ITEMS_MAX:
            self._place.refuse(f"{found} is above {values.ITEMS_MAX}, the most served", keyword)
        return found

    def members_least(self, keyword: str, value: Json) -> None:
        """Take minProperties: so many of those listed are there, or one that is not listed."""
        found = self.count(keyword, value)
        names, required = self._facts.only_names, self._facts.required
        is_open, more = names is None, found - len(required)
        optional = self._optional() if names is None else sorted(names - required)
        if more > 1 and is_open:  # two names may be the same, and then count once
            self._place.refuse(
                "more than one member beyond those required is served only where "
                "additionalProperties is false and there are no patternProperties",
                keyword,
            )
        if more <= 0 or not optional:
            self._out[keyword] = found
            return
        ways: list[Schema] = [{"required": list(few)} for few in self._few(optional, more)]
        if is_open:
            ways.append({"properties": dict.fromkeys(optional, False), keyword: found})
        self._choose(ways)

    def members_most(self, keyword: str, value: Json) -> None:
        """Take maxProperties: of those listed all but so many are not there."""
        found = self.count(keyword, value)
        names, optional = self._facts.only_names, self._optional()
        if names is None or not optional:
            self._out[keyword] = found
        elif found < len(names):
            less = self._few(sorted(names), len(names) - found)
            self._choose([{"properties": dict.fromkeys(few, False)} for few in less])

    def _choose(self, ways: list[Schema]) -> None:
        """Demand of objects one of some ways."""
        objects: list[Schema] = [{"type": ["object"], "allOf": [way]} for way in ways]
        self._also.append({"anyOf": [*of_kinds(self._facts.kinds - {"object"}), *objects]})

    def _optional(self) -> list[str]:
        """Return the members that are listed and not required."""
        listed = self._content.get("properties")
        names = listed if isinstance(listed, dict) else {}
        return [name for name in names if name not in self._facts.required]

    def _few(self, names: list[str], count: int) -> list[tuple[str, ...]]:
        """Return all choices of so many names."""
        if math.comb(len(names), count) > CHOICES_MAX:
            self._place.refuse(f"more than {CHOICES_MAX} ways to have so many members")
        return list(combinations(names, count))

    def items(self, keyword: str, value: Json) -> None:
        """Take items, of which a list is what prefixItems is since 2020-12."""
        if not isinstance(value, list):
            self._out[keyword] = self.inner(value, keyword)
            return
        if "prefixItems" in self._content:
            self._place.refuse("a list beside prefixItems", keyword)
        self._out["prefixItems"] = [
            self.inner(item, keyword, index) for index, item in enumerate(value)
        ]
        if "additionalItems" in self._content:
            rest = self._content["additionalItems"]
            self._out["items"] = self.inner(rest, "additionalItems")

    def number(self, keyword: str, value: Json) -> int | float:
        return values.bound(self._place, keyword, value, least=keyword.endswith("inimum"))

    def exclusive(self, keyword: str, value: Json) -> None:
        """Take an exclusive bound; true, as in draft 4, makes the inclusive one exclusive."""
        if not isinstance(value, bool):
            self._out[keyword] = self.number(keyword, value)
            return
        inclusive = {"exclusiveMinimum": "minimum", "exclusiveMaximum": "maximum"}[keyword]
        if value and inclusive in self._content:
            self._out[keyword] = self.number(inclusive, self._content[inclusive])

    def multiple(self, keyword: str, value: Json) -> None:
        """Take multipleOf; the library wants all of its decimals, so fewer are written beside."""
        forms = values.multiples(self._place, keyword, value)
        ways: list[Schema] = [{"multipleOf": forms[0]}]
        ways += [{"type": ["number"], "multipleOf": form} for form in forms[1:]]
        self._also.append({"anyOf": ways} if len(ways) > 1 else ways[0])

    def pattern(self, keyword: str, value: Json) -> None:
        if not isinstance(value, str):
            self._place.refuse("an expression is a text", keyword)
        self._also.append({"pattern": values.pattern(self._place.inner(value, keyword), value)})

    def format(self, keyword: str, value: Json) -> None:
        wanted = self._content.get("type", values.TYPES)
        self._also += values.format_demands(
            self._place, keyword, value, types=[wanted] if isinstance(wanted, str) else wanted
        )

    def dependencies(self, keyword: str, value: Json) -> None:
        """Take what a member demands where it is there: names, or a schema."""
        if not isinstance(value, dict):
            self._place.refuse("an object is needed", keyword)
        for name, wanted in value.items():
            if isinstance(wanted, list):
                required = values.names(self._place.inner(wanted, keyword), name, wanted)
                demand: Schema = {"required": required}
            else:
                demand = self.inner(wanted, keyword, name)
            there: Schema = {"type": ["object"], "required": [name]}
            self._also.append(
                {"anyOf": [{"properties": {name: False}}, {"allOf": [there, demand]}]}
            )

    def refuse(self, keyword: str, value: Json) -> None:
        """Refuse a keyword, unless this value of it demands nothing."""
        if _demands_nothing(keyword, value, self._content):
            return
        if self._facts.listed is None:
            self._place.refuse("is not served", keyword)
        self._filter()


def _demands_nothing(keyword: str, value: Json, content: Mapping[str, Any]) -> bool:
    """Return whether a keyword that is not served holds for every value anyway."""
    match keyword:
        case "uniqueItems":
            return value is False
        case "if":
            return content.get("then", True) in _TRUE and content.get("else", True) in _TRUE
        case "contains":
            return content.get("minContains") == 0 and "maxContains" not in content
        case "propertyNames" | "unevaluatedItems" | "unevaluatedProperties":
            return value in _TRUE
        case _:
            return False


_READERS: Final[Mapping[str, Callable[[_Reader, str, Json], Json]]] = {
    "$ref": _Reader.reference,
    "type": _Reader.types,
    "const": _Reader.constant,
    "enum": _Reader.options,
    "allOf": _Reader.schemas,
    "anyOf": _Reader.schemas,
    "properties": _Reader.members,
    "patternProperties": _Reader.patterns,
    "additionalProperties": _Reader.schema,
    "required": _Reader.required,
    "prefixItems": _Reader.schemas,
    "minItems": _Reader.items_count,
    "maxItems": _Reader.items_count,
    "minLength": _Reader.count,
    "maxLength": _Reader.count,
    "minimum": _Reader.number,
    "maximum": _Reader.number,
}
"""Keywords that stay what they are, and who reads the value."""
_WRITERS: Final[Mapping[str, Callable[[_Reader, str, Json], None]]] = {
    "items": _Reader.items,
    "pattern": _Reader.pattern,
    "format": _Reader.format,
    "minProperties": _Reader.members_least,
    "maxProperties": _Reader.members_most,
    "exclusiveMinimum": _Reader.exclusive,
    "exclusiveMaximum": _Reader.exclusive,
    "dependencies": _Reader.dependencies,
    "dependentRequired": _Reader.dependencies,
    "dependentSchemas": _Reader.dependencies,
    "multipleOf": _Reader.multiple,
    "divisibleBy": _Reader.refuse,
    "oneOf": _Reader.one_of,
    "not": _Reader.negation,
    "if": _Reader.condition,
    "contains": _Reader.refuse,
    "uniqueItems": _Reader.refuse,
    "propertyNames": _Reader.refuse,
    "unevaluatedItems": _Reader.refuse,
    "unevaluatedProperties": _Reader.refuse,
    "$dynamicRef": _Reader.refuse,
    "$recursiveRef": _Reader.refuse,
}
"""Keywords that are written in other words, or not served."""
