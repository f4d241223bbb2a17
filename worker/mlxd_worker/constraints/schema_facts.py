"""What is known of a value that has to match several parts of a schema at once.

Invariants:
- What is told is so for every value that matches all of the parts; what is not told may be so.
- Looking ends after `LEVELS` steps into alternatives and members, where nothing more is told.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator
from dataclasses import replace
from functools import cached_property
from itertools import combinations
from typing import Final

from mlxd_worker.constraints.schema_check import holds, is_of_type, key_of
from mlxd_worker.constraints.schema_places import Draft, Json, Place, SchemaError
from mlxd_worker.constraints.schema_values import TYPES

LEVELS: Final = 5
FRACTION: Final = "fraction"
"""A number that is no integer: types overlap, kinds do not."""
KINDS: Final = frozenset({"null", "boolean", "integer", FRACTION, "string", "array", "object"})
_PLAIN: Final = frozenset(
    {
        "type", "enum", "const", "minimum", "maximum", "minLength", "maxLength", "pattern",
        "minItems", "maxItems", "items", "required", "properties", "additionalProperties",
        "patternProperties", "prefixItems", "additionalItems",
    }
)  # fmt: skip
"""Keywords that say what a value is, not what it is not."""
NUMBERS: Final = frozenset({"integer", FRACTION})


def kinds_of(types: Json) -> frozenset[str]:
    """Return the kinds of values that a `type` means; all of them where it makes no sense."""
    names = types if isinstance(types, list) else [types]
    if any(name not in TYPES for name in names):
        return KINDS
    return frozenset(KINDS.intersection(names)) | (NUMBERS if "number" in names else frozenset())


def kind_of(value: Json, draft: Draft) -> str:
    """Return the kind of a value."""
    types = sorted(KINDS - {FRACTION})
    return next((kind for kind in types if is_of_type(value, kind, draft)), FRACTION)


class Facts:
    """The parts that a value has to match, and what follows. Never changed."""

    def __init__(self, places: tuple[Place, ...], levels: int = LEVELS) -> None:
        """Look at the parts and at those that they demand besides.

        Raises:
            SchemaError: a reference leads nowhere.
        """
        self._levels = levels
        self._is_void = False
        self.places = places
        self.parts: list[Place] = []
        """Parts that are objects, references followed and `allOf` taken apart."""
        seen: set[int] = set()
        for place in places:
            self._collect(place, seen)

    def and_also(self, *places: Place) -> Facts:
        """Return the facts with further parts."""
        return Facts((*self.places, *places), self._levels)

    @cached_property
    def kinds(self) -> frozenset[str]:
        """The kinds that the value may be of."""
        found = frozenset() if self._is_void else KINDS
        for part in self.parts:
            if "type" in part.content:
                found &= kinds_of(part.content["type"])
        if self.listed is not None and self.parts:
            draft = self.parts[0].document.draft
            found &= {kind_of(value, draft) for value in self.listed}
        if self._levels:
            for options in self._alternatives():
                found &= frozenset().union(
                    *(Facts((option,), self._levels - 1).kinds for option in options)
                )
        return found

    @cached_property
    def listed(self) -> list[Json] | None:
        """The constants that the value is one of; None where none are listed."""
        found: list[Json] | None = None
        for part in self.parts:
            lists = [part.content["enum"]] if isinstance(part.content.get("enum"), list) else []
            lists += [[part.content["const"]]] if "const" in part.content else []
            for values in lists:
                keys = set(map(key_of, values))
                known = values if found is None else found
                found = [value for value in known if key_of(value) in keys]
        return found

    @cached_property
    def _keys(self) -> frozenset[Hashable]:
        return frozenset(map(key_of, self.listed or ()))

    def excludes(self, other: Facts) -> bool:
        """Whether it is seen at once that no value matches both."""
        if not self.kinds & other.kinds:
            return True
        both = self.listed is not None and other.listed is not None
        return both and self._keys.isdisjoint(other._keys)

    @cached_property
    def required(self) -> frozenset[str]:
        """The members that an object has to have."""
        lists = (part.content.get("required") for part in self.parts)
        return frozenset(
            name for names in lists if isinstance(names, list) for name in names if _is_text(name)
        )

    @cached_property
    def only_names(self) -> frozenset[str] | None:
        """The members that an object may have; None where that is not known."""
        found: frozenset[str] | None = None
        for part in self.parts:
            content = part.content
            if content.get("additionalProperties") is False and not content.get(
                "patternProperties"
            ):
                names = frozenset(_members(content))
                found = names if found is None else found & names
        return found

    def member(self, name: str) -> Facts:
        """Return what is known of one member of an object."""
        places: list[Place] = []
        for part in self.parts:
            content = part.content
            if name in _members(content):
                places.append(part.inner(_members(content)[name], "properties", name))
            elif "additionalProperties" in content and not content.get("patternProperties"):
                inner = content["additionalProperties"]
                places.append(part.inner(inner, "additionalProperties"))
        return Facts(tuple(places), max(self._levels - 1, 0))

    def items(self) -> Facts:
        """Return what is known of each item of a list."""
        places = [
            part.inner(part.content["items"], "items")
            for part in self.parts
            if isinstance(part.content.get("items"), dict | bool)
            and not part.content.get("prefixItems")
        ]
        return Facts(tuple(places), max(self._levels - 1, 0))

    @cached_property
    def is_impossible(self) -> bool:
        """Whether it is certain that no value matches."""
        if not self.kinds:
            return True
        if self.listed is not None:
            return not any(self._may_be(value) for value in self.listed)
        if not self._levels:
            return False
        return all(self._never(kind) for kind in self.kinds) or any(
            all(Facts((*self.places, o), self._levels - 1).is_impossible for o in options)
            for options in self._alternatives()
        )

    def _may_be(self, value: Json) -> bool:
        try:
            return all(holds(_plain(part), value) for part in self.parts)
        except SchemaError:
            return True

    def _never(self, kind: str) -> bool:
        """Whether it is certain that no value of a kind matches."""
        match kind:
            case "string":
                pairs = combinations(self._patterns(), 2)
                return self._least("minLength") > self._most("maxLength") or any(
                    self._apart(first, second) for first, second in pairs
                )
            case "array":
                least = self._least("minItems")
                return least > self._most("maxItems") or (least > 0 and self.items().is_impossible)
            case "object":
                return any(self.member(name).is_impossible for name in sorted(self.required))
            case "integer" | "fraction":
                return self._least("minimum") > self._most("maximum")
        return False

    def _apart(self, first: str, second: str) -> bool:
        return self.parts[0].document.patterns.never_both(first, second)

    def _least(self, keyword: str) -> int | float:
        return max(self._bounds(keyword), default=-math.inf)

    def _most(self, keyword: str) -> int | float:
        return min(self._bounds(keyword), default=math.inf)

    def _bounds(self, keyword: str) -> list[int | float]:
        found = [part.content.get(keyword) for part in self.parts]
        return [v for v in found if isinstance(v, int | float) and not isinstance(v, bool)]

    def _patterns(self) -> list[str]:
        found = [part.content.get("pattern") for part in self.parts]
        return sorted({pattern for pattern in found if type(pattern) is str})

    def _alternatives(self) -> Iterator[list[Place]]:
        for part in self.parts:
            for keyword in ("anyOf", "oneOf"):
                options = part.content.get(keyword)
                if isinstance(options, list) and options:
                    yield [part.inner(option, keyword, i) for i, option in enumerate(options)]

    def _collect(self, place: Place, seen: set[int]) -> None:
        content = place.content
        if content is False:
            self._is_void = True
        if not isinstance(content, dict) or id(content) in seen:
            return
        seen.add(id(content))
        if "$ref" in content:
            self._collect(place.document.target(place, content["$ref"]), seen)
            if place.document.draft <= Draft.DRAFT_7:
                return
        self.parts.append(place)
        both = content.get("allOf")
        for index, inner in enumerate(both if isinstance(both, list) else ()):
            self._collect(place.inner(inner, "allOf", index), seen)


def _members(content: dict[str, Json]) -> dict[str, Json]:
    found = content.get("properties")
    return found if isinstance(found, dict) else {}


def _plain(place: Place) -> Place:
    """Return what a part demands by itself: no demand may be left out because of itself."""
    content = {key: value for key, value in place.content.items() if key in _PLAIN}
    return replace(place, content=content)


def _is_text(value: Json) -> bool:
    return isinstance(value, str)
