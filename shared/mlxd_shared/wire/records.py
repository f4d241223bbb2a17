"""Dataclasses to messages of the same shape and back, field by field, as their types say.

A field is on the wire under its own name, or under one that follows from it: bytes are `_bytes`
there, and a Duration of seconds is called without `_s`. None is what is absent. What an enum of a
later version says reads as UNKNOWN, AUTO or None. Nothing is checked.
"""

from __future__ import annotations

import datetime as dt
import enum
import math
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from functools import lru_cache, partial
from typing import Any, TypeAlias, TypeVar, get_args, get_origin, get_type_hints

from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from google.protobuf.timestamp_pb2 import Timestamp

_T = TypeVar("_T")
_E = TypeVar("_E", bound=enum.Enum)
_V = TypeVar("_V", bound=int)
_M = TypeVar("_M", bound=Message)
_Codec: TypeAlias = tuple[Callable[[Any], Any], Callable[[Any], Any]]
"""What reads a field, and what writes it."""
_NAMES = {
    "sampling": "effective_sampling",
    "age_s": "figures_age",
    "cpu_s": "cpu_seconds",
    "started_unix_s": "start_time",
    "total": "sum",
    "variables_json": "template_variables_json",
}
"""What is called otherwise on the wire, where no rule leads from one name to the other."""
_ELSEWHERE = ("calls", "form_is_known")
"""What is on no wire: the client, or whoever reads, adds it."""
UNSAID = "UNSPECIFIED"
"""What the wire calls a member of an enum that says nothing, UNKNOWN or AUTO here."""


def read(kind: type[_T], pb: Message, **others: object) -> _T:
    """Return the dataclass that a message spells; `others` are the fields that it cannot spell."""
    shape: Any = kind  # mypy doubts that a type is hashable
    values = {
        field.name: field.read(getattr(pb, field.wire))
        if not field.may_be_absent or pb.HasField(field.wire)
        else None
        for field in plan_fields(shape, pb.DESCRIPTOR)
    }
    return kind(**values | others)


def write(value: object, kind: type[_M]) -> _M:
    """Return the message that spells a dataclass.

    What is None stays absent, and so does a message that would say no more than its absence.
    """
    values: dict[str, Any] = {}
    shape: Any = type(value)
    for field in plan_fields(shape, kind.DESCRIPTOR):
        plain = getattr(value, field.name)
        if plain is not None and plain != field.unsaid:
            values[field.wire] = field.write(plain)
    return kind(**values)


def write_field(value: Any, wire: FieldDescriptor) -> Any:  # noqa: ANN401 - of any field
    """Return a value as a message takes it for this field; None stays absent."""
    hint: Any = tuple[Any, ...] if wire.is_repeated else type(value)
    return None if value is None else _choose_codec(hint, wire)[1](value)


def map_numbers(kind: type[_E], value: Callable[[str], _V], prefix: str) -> dict[_E, _V]:
    """Return each member's number on the wire; `value` is the wire's own function of its names."""
    return {
        member: value(prefix + (UNSAID if member.name in ("UNKNOWN", "AUTO") else member.name))
        for member in kind
    }


def duration_to_pb(seconds: float) -> Duration:
    """Return `seconds`; infinity becomes -1 s, which the wire reads as for ever."""
    if math.isinf(seconds):  # a duration on the wire cannot be infinite
        return Duration(seconds=-1)
    duration = Duration()
    duration.FromNanoseconds(round(seconds * 1e9))
    return duration


def duration_from_pb(duration: Duration) -> float:
    """Return seconds; any negative duration is infinity. See `checked_duration_s`."""
    seconds = duration.ToNanoseconds() / 1e9
    return math.inf if seconds < 0 else seconds


def timestamp_to_pb(unix_s: float) -> Timestamp:
    """Return the moment `unix_s` seconds after the epoch, to the microsecond (a float's grain)."""
    stamp = Timestamp()
    stamp.FromMicroseconds(round(unix_s * 1e6))
    return stamp


def timestamp_from_pb(stamp: Timestamp) -> dt.datetime | None:
    """Return the moment, in UTC; None for the epoch, as which an absent one reads."""
    return stamp.ToDatetime(tzinfo=dt.UTC) if stamp.ToNanoseconds() else None


@dataclass(frozen=True, slots=True)
class PlannedField:
    """How one field is read and written."""

    name: str
    wire: str
    read: Callable[[Any], Any]
    write: Callable[[Any], Any]
    may_be_absent: bool
    """Whether its absence is None."""
    unsaid: object
    """The value that a message is left out for; None: it is always written."""


@lru_cache(maxsize=256)
def plan_fields(kind: Any, descriptor: Descriptor) -> tuple[PlannedField, ...]:  # noqa: ANN401
    """Return how the fields of a dataclass are read from messages, and written to them."""
    hints = get_type_hints(kind)
    planned = []
    for field in fields(kind):
        if field.name in _ELSEWHERE:
            continue
        wire = _find_wire_field(field.name, descriptor)
        hint, is_optional = _strip_none(hints[field.name])
        default = None if field.default is MISSING else field.default
        reader, writer = _choose_codec(hint, wire)
        planned.append(
            PlannedField(
                field.name,
                wire.name,
                reader,
                writer,
                may_be_absent=is_optional and wire.has_presence,
                unsaid=default if wire.message_type is not None else None,
            )
        )
    return tuple(planned)


def _find_wire_field(name: str, descriptor: Descriptor) -> FieldDescriptor:
    stem = name.removesuffix("_s")
    names = (name, name.replace("nbytes", "bytes"), stem, f"{stem}_duration", _NAMES.get(name, ""))
    known = descriptor.fields_by_name
    return next(known[each] for each in names if each in known)


def _strip_none(hint: Any) -> tuple[Any, bool]:  # noqa: ANN401 - of any field
    options = [each for each in get_args(hint) if each is not type(None)]
    is_optional = len(options) == 1 and type(None) in get_args(hint)
    return (options[0], True) if is_optional else (hint, False)


def _choose_codec(hint: Any, wire: FieldDescriptor) -> _Codec:  # noqa: ANN401 - of any field
    """Return what reads a field of this type, and what writes it."""
    if wire.is_repeated:
        return _choose_list_codec(hint, wire)
    if wire.enum_type is not None:
        return _make_enum_codec(hint, wire.enum_type)
    if wire.message_type is None:
        return _keep, _keep
    if wire.message_type is Duration.DESCRIPTOR:
        return duration_from_pb, duration_to_pb
    if wire.message_type is Timestamp.DESCRIPTOR:
        return (timestamp_from_pb if hint is dt.datetime else _read_unix_s), timestamp_to_pb
    return partial(read, hint), partial(write, kind=GetMessageClass(wire.message_type))


def _choose_list_codec(hint: Any, wire: FieldDescriptor) -> _Codec:  # noqa: ANN401 - of any field
    is_mapping = get_origin(hint) is Mapping
    if wire.message_type is None:
        return tuple, _keep
    message = GetMessageClass(wire.message_type)
    if wire.message_type.GetOptions().map_entry:
        return (dict if is_mapping else _sort_items), dict
    if is_mapping:  # of messages that are a key and a value each
        key, value = (field.name for field in wire.message_type.fields)
        return (
            lambda pbs: {getattr(pb, key): getattr(pb, value) for pb in pbs},
            lambda pairs: [message(**{key: each, value: pairs[each]}) for each in pairs],
        )
    kind = get_args(hint)[0]
    return (
        lambda pbs: tuple([read(kind, pb) for pb in pbs]),
        lambda values: [write(value, message) for value in values],
    )


def _make_enum_codec(kind: type[enum.Enum], wire: EnumDescriptor) -> _Codec:
    prefix = wire.values_by_number[0].name.removesuffix(UNSAID)
    numbers = map_numbers(kind, lambda name: wire.values_by_name[name].number, prefix)
    members = {number: member for member, number in numbers.items()}
    unsaid = members.get(0)
    return lambda number: members.get(number, unsaid), numbers.__getitem__


def _keep(value: object) -> object:
    return value


def _sort_items(pairs: Mapping[Any, Any]) -> tuple[tuple[Any, Any], ...]:
    return tuple(sorted(pairs.items()))


def _read_unix_s(stamp: Timestamp) -> float:
    return stamp.ToMicroseconds() / 1e6
