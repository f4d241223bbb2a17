"""Where a part of a JSON schema stands, and what its references mean.

Invariants:
- A place is known by its JSON pointer from the root, which every error tells.
- A reference is followed within the text alone; nothing is fetched.
- What is referred to is written once, under a name of its own.
- Parts that are looked at are counted, once more each time, and none is deeper than `DEPTH_MAX`.
"""

from __future__ import annotations

import enum
import math
import re
import urllib.parse
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Final, NoReturn, TypeAlias

Json: TypeAlias = Any
"""Whatever a JSON text may hold."""

DEPTH_MAX: Final = 100
SUBSCHEMAS_MAX: Final = 50_000
POINTER_CHARS_MAX: Final = 200


class SchemaError(ValueError):
    """A schema that makes no sense or is not served, with the place in it."""

    def __init__(self, place: str, problem: str) -> None:
        """Tell the place, a JSON pointer or line:column, and what is wrong there."""
        if len(place) > POINTER_CHARS_MAX:
            place = f"{place[:POINTER_CHARS_MAX]}…"
        super().__init__(f"{place}: {problem}")


class Draft(enum.IntEnum):
    """The versions of JSON Schema that are read."""

    DRAFT_4 = 4
    DRAFT_6 = 6
    DRAFT_7 = 7
    DRAFT_2019_09 = 8
    DRAFT_2020_12 = 9


_INDEX: Final = re.compile("[0-9]{1,9}")
_DRAFTS: Final = {
    "json-schema.org/draft-04/schema": Draft.DRAFT_4,
    "json-schema.org/draft-06/schema": Draft.DRAFT_6,
    "json-schema.org/draft-07/schema": Draft.DRAFT_7,
    "json-schema.org/draft/2019-09/schema": Draft.DRAFT_2019_09,
    "json-schema.org/draft/2020-12/schema": Draft.DRAFT_2020_12,
}


class Document:
    """One text with a schema, and the references in it that are still to be written."""

    def __init__(self, content: Json) -> None:
        self.content = content
        self.draft = _draft(content)
        self.waiting: dict[str, Place] = {}
        """What has been referred to and is not written yet, by its name."""
        self._multiple: Fraction | None = None
        self._parts = 0
        self._names: dict[str, str] = {}
        self._ends: set[str] = set()
        """Parts that are known to demand something of their own in the end."""

    def count(self, pointer: str) -> None:
        """Count one more part that is looked at; raises SchemaError if they are too many."""
        self._parts += 1
        if self._parts > SUBSCHEMAS_MAX:
            raise SchemaError(pointer, f"more than {SUBSCHEMAS_MAX} parts")

    def common_multiple(self, number: Fraction) -> Fraction:
        """Return the least multiple of a number and of all those before."""
        last = self._multiple or number
        tops = number.numerator * last.denominator, last.numerator * number.denominator
        self._multiple = Fraction(math.lcm(*tops), number.denominator * last.denominator)
        return self._multiple

    def name_of(self, place: Place, reference: Json) -> str:
        """Return the name that a target is written under; raises SchemaError for none."""
        target = self.target(place, reference)
        if self._leads_back(target, frozenset([place.pointer])):
            place.refuse("leads back to itself, and to nothing else", "$ref")
        if target.pointer == "#":
            return "#"
        if target.pointer not in self._names:
            self._names[target.pointer] = name = f"d{len(self._names)}"
            self.waiting[name] = target
        return f"#/$defs/{self._names[target.pointer]}"

    def target(self, place: Place, reference: Json) -> Place:
        """Return the place that a reference means; raises SchemaError if it is not in this text."""
        if not isinstance(reference, str):
            place.refuse("a reference is a text", "$ref")
        if place.embedded:
            place.refuse("no reference is served in a part with an $id of its own", "$ref")
        base, _, fragment = reference.partition("#")
        here = _identity(self.content, self.draft)
        path = urllib.parse.unquote(fragment).split("/")
        target = Place(self, "#", self.content)
        is_here = not base or urllib.parse.urljoin(here, base) == here
        for part in path[1:] if is_here and not path[0] else [None]:
            child = target.child(part)
            if child is None:
                place.refuse(f"{reference[:80]!r} is not in this text", "$ref")
            target = child
        return target

    def _leads_back(self, place: Place, before: frozenset[str]) -> bool:
        """Tell whether a part means itself before it demands anything of a value's parts."""
        pointer, content = place.pointer, place.content
        if pointer in before:
            return True
        if pointer in self._ends or not isinstance(content, dict):
            return False
        self.count(pointer)  # what leads back depends on what came before: not remembered
        if len(before) > DEPTH_MAX:
            raise SchemaError(pointer, f"references more than {DEPTH_MAX} deep")
        here = before | {pointer}
        if "$ref" in content and self._leads_back(self.target(place, content["$ref"]), here):
            return True
        if any(self._leads_back(inner, here) for inner in place.list_places("allOf")):
            return True
        for keyword in ("anyOf", "oneOf"):
            options = place.list_places(keyword)
            if options and all(self._leads_back(option, here) for option in options):
                return True
        self._ends.add(pointer)
        return False


@dataclass(frozen=True, slots=True)
class Place:
    """One part of a schema, with its place."""

    document: Document
    pointer: str
    content: Json
    depth: int = 0
    embedded: bool = False
    """Whether it is in a part with an identity of its own, where references mean others."""

    def inner(self, content: Json, *path: str | int) -> Place:
        """Return the place of something in this part; raises SchemaError if it is too deep."""
        pointer = self._pointer_to(path)
        if self.depth == DEPTH_MAX:
            raise SchemaError(pointer, f"nested more than {DEPTH_MAX} deep")
        self.document.count(pointer)
        embedded = self.embedded or _identity(content, self.document.draft) != ""
        return Place(self.document, pointer, content, self.depth + 1, embedded)

    def list_places(self, keyword: str) -> list[Place]:
        """Return the places of a keyword's schemas; none where it has no list."""
        items = self.content.get(keyword)
        return [
            self.inner(item, keyword, index)
            for index, item in enumerate(items if isinstance(items, list) else ())
        ]

    def child(self, part: str | None) -> Place | None:
        """Return what one part of a JSON pointer leads to; no deeper, because nobody nests it."""
        key = "" if part is None else part.replace("~1", "/").replace("~0", "~")
        content = self.content
        if isinstance(content, dict) and part is not None and key in content:
            content = content[key]
        elif isinstance(content, list) and _INDEX.fullmatch(key) and int(key) < len(content):
            content = content[int(key)]
        else:
            return None
        embedded = self.embedded or _identity(content, self.document.draft) != ""
        return Place(self.document, self._pointer_to([key]), content, embedded=embedded)

    def refuse(self, problem: str, *path: str | int) -> NoReturn:
        """Raise the error about something in this part."""
        raise SchemaError(self._pointer_to(path), problem)

    def _pointer_to(self, path: Iterable[str | int]) -> str:
        parts = (str(part).replace("~", "~0").replace("/", "~1") for part in path)
        return "/".join([self.pointer, *parts])


def _draft(content: Json) -> Draft:
    """Return the version that a schema declares; the newest by default."""
    said = content.get("$schema") if isinstance(content, dict) else None
    if said is None:
        return Draft.DRAFT_2020_12
    if isinstance(said, str):
        draft = _DRAFTS.get(said.rstrip("#").removeprefix("https://").removeprefix("http://"))
        if draft is not None:
            return draft
    raise SchemaError("#/$schema", f"{str(said)[:80]!r} is not a draft from 4 to 2020-12")


def _identity(content: Json, draft: Draft) -> str:
    """Return the identity that a part gives itself, without a fragment; empty where none."""
    keyword = "id" if draft is Draft.DRAFT_4 else "$id"
    said = content.get(keyword) if isinstance(content, dict) else None
    return said.partition("#")[0] if isinstance(said, str) else ""
