"""Where a part of a JSON schema stands, and what its references mean.

Invariants:
- A place is known by its JSON pointer from the root, which every error tells.
- A reference is followed within the text alone; nothing is fetched.
- What is referred to is written once, under a name of its own.
"""

from __future__ import annotations

import enum
import urllib.parse
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any, Final, NoReturn, TypeAlias

from mlxd_worker.constraints.pattern_sets import PatternSets

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


class CannotWrite(SchemaError):
    """A way not to match a part, of which there may be others."""


class Draft(enum.IntEnum):
    """The versions of JSON Schema that are read."""

    DRAFT_4 = 4
    DRAFT_6 = 6
    DRAFT_7 = 7
    DRAFT_2019_09 = 8
    DRAFT_2020_12 = 9


_MAPS: Final = frozenset(
    {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies"}
)
"""Keywords whose members are schemas, under names of the user's."""
_CONSTANTS: Final = frozenset({"const", "enum", "default", "examples"})
"""Keywords whose values are no schemas, whatever they look like."""
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
        self.patterns = PatternSets()
        self._parts = 0
        self._looks = 0
        self.multiples: set[Fraction] = set()
        """What numbers are to be multiples of, somewhere."""
        self._names: dict[str, str] = {}
        self._base = ""
        self._ends: set[str] = set()
        """Parts that are known to demand something of their own in the end."""
        self._anchors: dict[str, list[str]] | None = None
        """The places of each anchor, once somebody has asked."""

    def root(self) -> Place:
        """Return the place of the whole schema."""
        root = Place(self, "#", self.content)
        if isinstance(self.content, dict):
            self._base = _identity(self.content, self.draft) or ""
        return root

    def count(self, pointer: str, parts: int = 1) -> None:
        """Count parts that are looked at, once more each time.

        Raises:
            SchemaError: they have become too many.
        """
        self._parts += parts
        if self._parts > SUBSCHEMAS_MAX:
            raise SchemaError(pointer, f"more than {SUBSCHEMAS_MAX} parts")

    def name_of(self, place: Place, reference: str) -> str:
        """Return the name under which what `reference` means is, or will be, written.

        Raises:
            SchemaError: there is no such thing in this text.
        """
        pointer = self._pointer(place, reference)
        if pointer == "#":
            return "#"
        if pointer not in self._names:
            name = self._names[pointer] = f"d{len(self._names)}"
            self.waiting[name] = self._find(place, pointer, reference)
        return f"#/$defs/{self._names[pointer]}"

    def target(self, place: Place, reference: Json) -> Place:
        """Return the place that a reference means, as deep as where it is followed from.

        Raises:
            SchemaError: there is no such thing in this text, or references go too deep.
        """
        if not isinstance(reference, str):
            place.refuse("a reference is a text", "$ref")
        found = self._find(place, self._pointer(place, reference), reference)
        return place.moved(found)

    def leads_back(self, place: Place) -> bool:
        """Tell whether a part means itself before it demands anything of a value's parts.

        Parts that do not are looked at once, however often this is asked; all looks are counted.

        Raises:
            SchemaError: a reference leads nowhere, or there are too many ways to follow them.
        """
        return self._leads_back(place, frozenset())

    def _leads_back(self, place: Place, before: frozenset[str]) -> bool:
        pointer, content = place.pointer, place.content
        if pointer in before:
            return True
        if pointer in self._ends or not isinstance(content, dict):
            return False
        self._count_look(pointer)  # what leads back depends on what came before: not remembered
        if len(before) == DEPTH_MAX:
            raise SchemaError(pointer, f"references more than {DEPTH_MAX} deep")
        here = before | {pointer}
        reference = content.get("$ref")
        if isinstance(reference, str):
            found = self._find(place, self._pointer(place, reference), reference)
            if self._leads_back(found, here):
                return True
        if not isinstance(reference, str) or self.draft > Draft.DRAFT_7:
            if any(self._leads_back(inner, here) for inner in place.listed("allOf")):
                return True
            for keyword in ("anyOf", "oneOf"):
                options = place.listed(keyword)
                if options and all(self._leads_back(inner, here) for inner in options):
                    return True
        self._ends.add(pointer)
        return False

    def _count_look(self, pointer: str) -> None:
        self._looks += 1
        if self._looks > SUBSCHEMAS_MAX:
            raise SchemaError(pointer, f"references lead through more than {SUBSCHEMAS_MAX} parts")

    def _pointer(self, place: Place, reference: str) -> str:
        """Return the pointer from the root that a reference means."""
        if place.embedded:
            place.refuse("no reference is served in a part with an $id of its own", "$ref")
        base, _, fragment = reference.partition("#")
        if base and urllib.parse.urljoin(self._base, base) != self._base.partition("#")[0]:
            place.refuse(f"{reference[:80]!r} is not in this text", "$ref")
        fragment = urllib.parse.unquote(fragment)
        if fragment and not fragment.startswith("/"):
            return self._anchor(place, fragment)
        return f"#{fragment}"

    def _anchor(self, place: Place, name: str) -> str:
        if self._anchors is None:
            self._anchors = self._collected_anchors()
        found = self._anchors.get(name, [])
        if len(found) != 1:
            problem = "is there more than once" if found else "is not there"
            place.refuse(f"the anchor {name[:80]!r} {problem}", "$ref")
        return found[0]

    def _collected_anchors(self) -> dict[str, list[str]]:
        """Return the places of all anchors but those in parts with an identity of their own."""
        anchors: dict[str, list[str]] = {}
        todo: list[tuple[str, Json, bool]] = [("#", self.content, True)]
        while todo:
            pointer, content, is_schema = todo.pop()
            if isinstance(content, list):
                todo += [(f"{pointer}/{i}", inner, True) for i, inner in enumerate(content)]
            if not isinstance(content, dict):
                continue
            if is_schema:
                if pointer != "#" and _is_embedded(content, self.draft):
                    continue
                for name in _anchors_of(content):
                    anchors.setdefault(name, []).append(pointer)
            todo += [
                (f"{pointer}/{_escaped(key)}", inner, not is_schema or key not in _MAPS)
                for key, inner in content.items()
                if not is_schema or key not in _CONSTANTS
            ]
        return anchors

    def _find(self, place: Place, pointer: str, reference: str) -> Place:
        content, embedded = self.content, False
        for part in pointer.split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            if isinstance(content, dict) and key in content:
                content = content[key]
            elif isinstance(content, list) and key.isdecimal() and int(key) < len(content):
                content = content[int(key)]
            else:
                place.refuse(f"{reference[:80]!r} is not in this text", "$ref")
            embedded = embedded or _is_embedded(content, self.draft)
        return Place(self, pointer, content, embedded=embedded)


@dataclass(frozen=True, slots=True)
class Place:
    """One part of a schema and where it stands."""

    document: Document
    pointer: str
    content: Json
    depth: int = 0
    embedded: bool = field(default=False, kw_only=True)
    """Whether it is in a part with an identity of its own, where references mean others."""

    def inner(self, content: Json, *path: str | int) -> Place:
        """Return the place of something in this part.

        Raises:
            SchemaError: it is too deep, or the schema too large.
        """
        embedded = self.embedded or _is_embedded(content, self.document.draft)
        return self.moved(Place(self.document, self._pointer_to(path), content, embedded=embedded))

    def listed(self, keyword: str) -> list[Place]:
        """Return the places of a keyword's schemas, uncounted; none where it has no list."""
        found = self.content.get(keyword)
        if not isinstance(found, list):
            return []
        embedded = (_is_embedded(content, self.document.draft) for content in found)
        return [
            replace(
                self,
                pointer=self._pointer_to((keyword, index)),
                content=content,
                embedded=self.embedded or own,
            )
            for index, (content, own) in enumerate(zip(found, embedded, strict=True))
        ]

    def moved(self, place: Place) -> Place:
        """Return another place as one step deeper than this one.

        Raises:
            SchemaError: it is too deep, or the schema too large.
        """
        if self.depth == DEPTH_MAX:
            raise SchemaError(place.pointer, f"nested more than {DEPTH_MAX} deep")
        self.document.count(place.pointer)
        return replace(place, depth=self.depth + 1)

    def cannot_write(self, problem: str, *path: str | int) -> NoReturn:
        """Raise the error about a way not to match this part."""
        raise CannotWrite(self._pointer_to(path), problem)

    def refuse(self, problem: str, *path: str | int) -> NoReturn:
        """Raise the error about something in this part."""
        raise SchemaError(self._pointer_to(path), problem)

    def _pointer_to(self, path: Iterable[str | int]) -> str:
        return "/".join([self.pointer, *(_escaped(str(part)) for part in path)])


def _draft(content: Json) -> Draft:
    """Return the version that a schema says it is of; the newest where it says nothing."""
    said = content.get("$schema") if isinstance(content, dict) else None
    if said is None:
        return Draft.DRAFT_2020_12
    if isinstance(said, str):
        found = _DRAFTS.get(said.rstrip("#").removeprefix("https://").removeprefix("http://"))
        if found is not None:
            return found
    raise SchemaError("#/$schema", f"{str(said)[:80]!r} is no draft from 4 to 2020-12")


def _identity(content: dict[str, Any], draft: Draft) -> str | None:
    """Return the identity that a part gives itself, unless it is an anchor."""
    said = content.get("id" if draft is Draft.DRAFT_4 else "$id")
    return said if isinstance(said, str) and said.partition("#")[0] else None


def _anchors_of(content: dict[str, Json]) -> list[str]:
    """Return the names that a part gives itself for references within the text."""
    names = [content.get(key) for key in ("$id", "id")]
    found = [name[1:] for name in names if isinstance(name, str) and name[:1] == "#" and name[1:]]
    anchor = content.get("$anchor")
    return [*found, anchor] if isinstance(anchor, str) else found


def _is_embedded(content: Json, draft: Draft) -> bool:
    return isinstance(content, dict) and _identity(content, draft) is not None


def _escaped(part: str) -> str:
    return part.replace("~", "~0").replace("/", "~1")
