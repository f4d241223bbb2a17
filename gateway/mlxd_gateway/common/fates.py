"""What becomes of each field of a request: honoured, passed over, or refused by name.

Requests are `msgspec` structs. A field is honoured unless its annotation says otherwise; one that
no struct has is refused too. docs/http.md is made from these annotations.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, get_args, get_origin, get_type_hints

import msgspec

from mlxd_gateway.common.failures import BadField
from mlxd_shared import config

ABSENT = msgspec.Raw()
"""The default of a field that holds any JSON."""
Stops = Annotated[list[str], msgspec.Meta(max_length=config.STOP_STRINGS_MAX)]
"""The texts before which an answer ends, of whichever API."""


class Kind(enum.Enum):
    """What a gateway does with a field that has a value."""

    HONOURED = "honoured"
    PASSED_OVER = "passed over"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Fate:
    """What becomes of a field, and why. `neutral` values ask for nothing and are never refused."""

    kind: Kind
    why: str = ""
    neutral: tuple[object, ...] = ()


HONOURED = Fate(Kind.HONOURED)


def honour(why: str) -> Fate:
    """Return the fate of a field of which there is something to say."""
    return Fate(Kind.HONOURED, why)


def pass_over(why: str) -> Fate:
    """Return the fate of a field that clients send though nothing here depends on it.

    Such a field is a `msgspec.Raw`: nothing is made of what it holds, however much that is.
    """
    return Fate(Kind.PASSED_OVER, why)


def turn_down(why: str, *, neutral: tuple[object, ...] = ()) -> Fate:
    """Return the fate of a field that cannot be honoured; null and `neutral` ask for nothing."""
    return Fate(Kind.REFUSED, why, neutral)


class Foreign(msgspec.Struct):
    """What an API's requests may hold and a gateway cannot serve: refused whole, by its type."""

    why: ClassVar[str] = ""


def foreign(why: str, *tags: str) -> tuple[type[msgspec.Struct], ...]:
    """Return a struct that is refused for each of these values of `type`."""
    return tuple(
        msgspec.defstruct(
            f"Foreign_{tag}", [], bases=(Foreign,), namespace={"why": why}, tag=tag,
            module=__name__,
        )
        for tag in tags
    )  # fmt: skip


@functools.cache
def fates_of(kind: type[msgspec.Struct]) -> Mapping[str, Fate]:
    """Return the fate of each field of a struct, under the field's name in JSON."""
    hints = get_type_hints(kind, include_extras=True)
    names = zip(kind.__struct_fields__, kind.__struct_encode_fields__, strict=True)
    return {encoded: _fate(hints[name]) for name, encoded in names}


def _fate(hint: object) -> Fate:
    if get_origin(hint) is Annotated:
        return next((note for note in get_args(hint) if isinstance(note, Fate)), HONOURED)
    return HONOURED


@functools.cache
def _list_of(kind: type[msgspec.Struct], wanted: Kind) -> tuple[tuple[str, str, Fate], ...]:
    """Return the fields of a struct that have such a fate: attribute, name in JSON, fate."""
    names = zip(kind.__struct_fields__, kind.__struct_encode_fields__, strict=True)
    fates = fates_of(kind)
    return tuple(
        (name, encoded, fates[encoded]) for name, encoded in names if fates[encoded].kind is wanted
    )


def refuse(request: msgspec.Struct) -> None:
    """Refuse a request with a field that cannot be honoured, at any depth.

    Raises:
        BadField: naming the first such field by its path, and why.
    """
    for path, struct in structs_in(request):
        if isinstance(struct, Foreign):
            raise BadField(_join(path, "type"), struct.why)
        for name, encoded, fate in _list_of(type(struct), Kind.REFUSED):
            content = _plain(getattr(struct, name))
            if content is not None and content not in fate.neutral:
                raise BadField(_join(path, encoded), fate.why)


def let_go(request: msgspec.Struct) -> None:
    """Give up what is passed over of a request, at any depth: it keeps the whole body alive."""
    for _, struct in structs_in(request):
        for name, _, _ in _list_of(type(struct), Kind.PASSED_OVER):
            setattr(struct, name, ABSENT)


def structs_in(struct: msgspec.Struct, path: str = "") -> Iterator[tuple[str, msgspec.Struct]]:
    """Yield a struct and those in it, each with its path; other values have no fields."""
    yield path, struct
    kind = type(struct)
    for name, encoded in zip(kind.__struct_fields__, kind.__struct_encode_fields__, strict=True):
        content = getattr(struct, name)
        if isinstance(content, msgspec.Struct):
            yield from structs_in(content, _join(path, encoded))
        elif isinstance(content, list):
            for index, entry in enumerate(content):
                if isinstance(entry, msgspec.Struct):
                    yield from structs_in(entry, f"{_join(path, encoded)}[{index}]")


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _plain(value: object) -> Any:  # noqa: ANN401 - whatever JSON has
    return None if value is msgspec.UNSET else value
