"""What a value has to be in order not to match a part of a schema, in keywords that are served.

It is written as alternatives, each of them a way to fail. What is known of the value already leaves
ways out, and makes some of them simple that are not by themselves.

Invariants:
- Of the values that match the context, none that matches the part matches the result, and those do
  that do not: but for ways that cannot be written, such as that some item of a list does not match.
  They are left out where the caller lets them and there are others; else the place is refused.
- The result is a schema like the user's own: it has still to be read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, Final

from mlxd_worker.constraints import schema_values as values
from mlxd_worker.constraints.pattern_reader import PatternError
from mlxd_worker.constraints.schema_check import check_known, holds
from mlxd_worker.constraints.schema_facts import (
    FRACTION,
    KINDS,
    NUMBERS,
    Facts,
    kind_of,
    kinds_of,
)
from mlxd_worker.constraints.schema_places import CannotWrite, Draft, Json, Place
from mlxd_worker.constraints.schema_values import INTEGER_FORMATS, KNOWN_FORMATS, WrittenPattern
from mlxd_worker.constraints.schema_writing import all_of, any_of, between, of_kinds, one_of

ITEMS_LOOKED_AT: Final = 3
"""Where some item of a list has not to match, it is one of the first."""
_ANYTHING: Final[tuple[Json, ...]] = (True, {})


def negated(place: Place, context: Facts, *, exact: bool) -> Json:
    """Return a schema for the values of a context that do not match what is at a place.

    exact: whether all such values are to match, or some ways not to match may be left out.

    Raises:
        SchemaError: it makes no sense, or cannot be written.
    """
    place.document.count(place.pointer)
    if context.listed is not None:
        left = [value for value in context.listed if not holds(place, value)]
        return one_of(left) if len(left) < len(context.listed) else True
    if context.and_also(place).is_impossible:
        return True
    if isinstance(place.content, bool):
        return not place.content
    if not isinstance(place.content, dict):
        place.refuse("a schema is an object, true or false")
    if place.embedded:
        place.refuse("what has not to match is not served with an $id of its own")
    return any_of(_Ways(place, context, exact=exact).all())


_Write = Callable[["_Ways", str, Any], list[Json]]


class _Ways:
    """The ways not to match one part."""

    def __init__(self, place: Place, context: Facts, *, exact: bool) -> None:
        self._exact = exact
        self._place = place
        self._content: Mapping[str, Any] = place.content
        self._context = context

    def all(self) -> list[Json]:
        """Return them; none where every value matches.

        Raises:
            CannotWrite: there are none but some that cannot be written.
        """
        if "$ref" in self._content and self._place.document.draft <= Draft.DRAFT_7:
            return self.reference("$ref", self._content["$ref"])
        found = [
            partial(self._of, keyword, value, ways[keyword])
            for keyword, value in self._content.items()
            for kinds, ways in _WAYS.items()
            if keyword in ways and kinds & self._context.kinds
        ]
        return self._some(found)

    def _of(self, keyword: str, value: Json, write: _Write) -> Json:
        """Return what fails one keyword."""
        check_known(self._place, keyword)
        try:
            return any_of(write(self, keyword, value))
        except (TypeError, AttributeError):
            self._place.refuse("a value that it does not take", keyword)

    def reference(self, _: str, value: Json) -> list[Json]:
        return [self._negated(self._place.document.target(self._place, value))]

    def types(self, keyword: str, value: Json) -> list[Json]:
        kinds = self._context.kinds - kinds_of(values.types(self._place, keyword, value))
        if FRACTION in kinds and "integer" not in kinds and "integer" in self._context.kinds:
            if self._exact or kinds == {FRACTION}:
                self._place.cannot_write("to be no integer is not served", keyword)
            kinds -= {FRACTION}
        return of_kinds(kinds)

    def constant(self, keyword: str, value: Json) -> list[Json]:
        return self.options(keyword, [value])

    def options(self, keyword: str, value: list[Json]) -> list[Json]:
        draft = self._place.document.draft
        by_kind: dict[str, list[Json]] = {}
        for item in value:
            kind = kind_of(item, draft)
            by_kind.setdefault("number" if kind in NUMBERS else kind, []).append(item)
        kinds = self._context.kinds
        found = of_kinds(kinds - by_kind.keys() - (NUMBERS if "number" in by_kind else set()))
        if "boolean" in by_kind and "boolean" in kinds:
            found.append(one_of([flag for flag in (False, True) if flag not in by_kind["boolean"]]))
        if "number" in by_kind and kinds & NUMBERS:
            found += between(by_kind["number"], "number" if FRACTION in kinds else "integer")
        if "string" in by_kind and "string" in kinds:
            texts = by_kind["string"]
            found.append(
                self._pattern(keyword, lambda: self._place.document.patterns.without_texts(texts))
            )
        for kind, least in (("array", "minItems"), ("object", "minProperties")):
            if kind in by_kind and kind in kinds:
                if not any(by_kind[kind]):
                    found.append({"type": [kind], least: 1})
                elif self._exact or not found:
                    self._place.cannot_write(f"to be no certain {kind} is not served", keyword)
        return found

    def every(self, keyword: str, value: list[Json]) -> list[Json]:
        parts = self._parts(keyword, value)
        return self._some([partial(self._negated, part) for part in parts])

    def any(self, keyword: str, value: list[Json]) -> list[Json]:
        return [all_of(self._negated(part) for part in self._parts(keyword, value))]

    def exactly_one(self, keyword: str, value: list[Json]) -> list[Json]:
        found = self.any(keyword, value)
        parts = self._parts(keyword, value)
        for index, first in enumerate(parts):
            for second in parts[:index]:
                if not self._context.and_also(first, second).is_impossible:
                    found.append({"allOf": [first.content, second.content]})
        return found

    def opposite(self, _: str, value: Json) -> list[Json]:
        return [value]

    def condition(self, keyword: str, value: Json) -> list[Json]:
        wanted = self._place.inner(value, keyword)
        found = []
        if "then" in self._content:
            then = self._place.inner(self._content["then"], "then")
            found.append(
                all_of([value, negated(then, self._context.and_also(wanted), exact=self._exact)])
            )
        if "else" in self._content:
            other = self._place.inner(self._content["else"], "else")
            both = (self._negated(wanted), self._negated(other))
            found.append(all_of(both))
        return found

    def pattern(self, keyword: str, value: str) -> list[Json]:
        return [self._pattern(keyword, lambda: self._place.document.patterns.without(value))]

    def format(self, keyword: str, value: Json) -> list[Json]:
        strings = "string" in self._context.kinds and value in KNOWN_FORMATS
        if strings or (self._context.kinds & NUMBERS and value in INTEGER_FORMATS):
            self._place.cannot_write("is served only where nothing has not to match it", keyword)
        return []

    def minimum(self, _: str, value: Json) -> list[Json]:
        inclusive = self._content.get("exclusiveMinimum") is True
        return [{"type": ["number"], "maximum" if inclusive else "exclusiveMaximum": value}]

    def maximum(self, _: str, value: Json) -> list[Json]:
        inclusive = self._content.get("exclusiveMaximum") is True
        return [{"type": ["number"], "minimum" if inclusive else "exclusiveMinimum": value}]

    def exclusive(self, keyword: str, value: Json) -> list[Json]:
        other = {"exclusiveMinimum": "maximum", "exclusiveMaximum": "minimum"}[keyword]
        return [] if isinstance(value, bool) else [{"type": ["number"], other: value}]

    def least(self, keyword: str, value: Json) -> list[Json]:
        kind, other = _COUNTS[keyword]
        found = values.count(self._place, keyword, value)
        return [{"type": [kind], other: found - 1}] if found > 0 else []

    def most(self, keyword: str, value: Json) -> list[Json]:
        kind, other = _COUNTS[keyword]
        return [{"type": [kind], other: values.count(self._place, keyword, value) + 1}]

    def required(self, keyword: str, value: Json) -> list[Json]:
        names = values.names(self._place, keyword, value)
        names = [name for name in names if name not in self._context.required]
        return [{"type": ["object"], "properties": {name: False}} for name in names]

    def members(self, keyword: str, value: dict[str, Json]) -> list[Json]:
        places = {name: self._place.inner(part, keyword, name) for name, part in value.items()}
        return self._some([partial(self._member, name, place) for name, place in places.items()])

    def additional(self, keyword: str, value: Json) -> list[Json]:
        if value in _ANYTHING:
            return []
        names = self._context.only_names
        if names is None or self._content.get("patternProperties"):
            self._place.cannot_write("a member besides those listed is not served here", keyword)
        known = self._content.get("properties", {})
        inner = self._place.inner(value, keyword)
        others = sorted(name for name in names if name not in known)
        return self._some([partial(self._member, name, inner) for name in others])

    def patterned(self, keyword: str, value: dict[str, Json]) -> list[Json]:
        if any(schema not in _ANYTHING for schema in value.values()):
            self._place.cannot_write("is not served where something has not to match", keyword)
        return []

    def items(self, keyword: str, value: Json) -> list[Json]:
        if value in _ANYTHING:
            return []
        inner, known = self._place.inner(value, keyword), self._context.items()
        listed = isinstance(value, list) or "prefixItems" in self._content
        if not listed and known.and_also(inner).is_impossible:
            return [{"type": ["array"], "minItems": 1}]
        if listed or self._exact:
            self._place.cannot_write("is not served where some item has not to match", keyword)
        wrong = negated(inner, known, exact=False)
        return [
            {"type": ["array"], "prefixItems": [*[True] * place, wrong], "minItems": place + 1}
            for place in range(ITEMS_LOOKED_AT)
        ]

    def dependencies(self, keyword: str, value: dict[str, Json]) -> list[Json]:
        found: list[Json] = []
        for name, demand in value.items():
            there = {"type": ["object"], "required": [name]}
            if isinstance(demand, list):
                found += [{**there, "properties": {other: False}} for other in demand]
            else:
                inner = self._place.inner(demand, keyword, name)
                found.append(all_of([there, self._negated(inner)]))
        return found

    def unless_neutral(self, keyword: str, value: Json) -> list[Json]:
        neutral = value is False if keyword == "uniqueItems" else value in _ANYTHING
        if not neutral:
            self._place.cannot_write("is not served where something has not to match", keyword)
        return []

    def _negated(self, place: Place) -> Json:
        return negated(place, self._context, exact=self._exact)

    def _some(self, ways: Iterable[Callable[[], Json]]) -> list[Json]:
        """Return the ways that can be written.

        Raises:
            CannotWrite: there are none, but some that cannot; or all are wanted.
        """
        found: list[Json] = []
        missing: CannotWrite | None = None
        for write in ways:
            try:
                found.append(write())
            except CannotWrite as error:
                missing = missing or error
        if missing is not None and (self._exact or all(way is False for way in found)):
            raise missing
        return found

    def names(self, keyword: str, value: Json) -> list[Json]:
        """Fail propertyNames: where no name matches, any member does."""
        if value is False or value == {"not": {}}:
            return [{"type": ["object"], "minProperties": 1}]
        return self.unless_neutral(keyword, value)

    def _member(self, name: str, place: Place) -> Json:
        """Return the way to have a member that does not match."""
        found = negated(place, self._context.member(name), exact=self._exact)
        if found is False:
            return False
        way = {"type": ["object"], "required": [name]}
        return way if found is True else {**way, "properties": {name: found}}

    def _parts(self, keyword: str, value: list[Json]) -> list[Place]:
        return [self._place.inner(part, keyword, index) for index, part in enumerate(value)]

    def _pattern(self, keyword: str, write: Callable[[], str]) -> Json:
        try:
            return {"type": ["string"], "pattern": WrittenPattern(write())}
        except PatternError as error:
            self._place.cannot_write(str(error), keyword)


_COUNTS: Final = {
    "minLength": ("string", "maxLength"),
    "maxLength": ("string", "minLength"),
    "minItems": ("array", "maxItems"),
    "maxItems": ("array", "minItems"),
    "minProperties": ("object", "maxProperties"),
    "maxProperties": ("object", "minProperties"),
}
_WAYS: Final[Mapping[frozenset[str], Mapping[str, _Write]]] = {
    KINDS: {
        "$ref": _Ways.reference,
        "type": _Ways.types,
        "const": _Ways.constant,
        "enum": _Ways.options,
        "allOf": _Ways.every,
        "anyOf": _Ways.any,
        "oneOf": _Ways.exactly_one,
        "not": _Ways.opposite,
        "if": _Ways.condition,
        "format": _Ways.format,
        "$dynamicRef": _Ways.unless_neutral,
        "$recursiveRef": _Ways.unless_neutral,
    },
    frozenset({"string"}): {
        "pattern": _Ways.pattern,
        "minLength": _Ways.least,
        "maxLength": _Ways.most,
    },
    NUMBERS: {
        "minimum": _Ways.minimum,
        "maximum": _Ways.maximum,
        "exclusiveMinimum": _Ways.exclusive,
        "exclusiveMaximum": _Ways.exclusive,
        "multipleOf": _Ways.unless_neutral,
        "divisibleBy": _Ways.unless_neutral,
    },
    frozenset({"array"}): {
        "items": _Ways.items,
        "minItems": _Ways.least,
        "maxItems": _Ways.most,
        "prefixItems": _Ways.unless_neutral,
        "contains": _Ways.unless_neutral,
        "uniqueItems": _Ways.unless_neutral,
        "unevaluatedItems": _Ways.unless_neutral,
    },
    frozenset({"object"}): {
        "required": _Ways.required,
        "properties": _Ways.members,
        "additionalProperties": _Ways.additional,
        "patternProperties": _Ways.patterned,
        "minProperties": _Ways.least,
        "maxProperties": _Ways.most,
        "propertyNames": _Ways.names,
        "dependencies": _Ways.dependencies,
        "dependentRequired": _Ways.dependencies,
        "dependentSchemas": _Ways.dependencies,
        "unevaluatedProperties": _Ways.unless_neutral,
    },
}
"""The ways not to match each keyword, by the kinds of values that it concerns."""
