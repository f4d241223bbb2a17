"""Serialised requests that overfill one field each, by descriptors: every list, text and message.

What a client writes need not be what a library would write: entries of two bytes, one text as long
as the whole, numbers one by one, fields that nobody knows. So the bytes are made by hand.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from tests.system.wire.walk import methods

TEXTS = (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES)
FIXED = {
    FieldDescriptor.TYPE_FLOAT: 5,
    FieldDescriptor.TYPE_FIXED32: 5,
    FieldDescriptor.TYPE_DOUBLE: 1,
    FieldDescriptor.TYPE_FIXED64: 1,
}
MILLION = 1 << 20
UNKNOWN = 2047
"""The number of a field that no message has."""


@dataclass(frozen=True, slots=True)
class Overfull:
    """Bytes that hold too much in one place."""

    path: str
    how: str
    raw: bytes
    is_list: bool = False


def number(value: int) -> bytes:
    """Return a number of variable length."""
    written = b""
    while value > 0x7F:
        written += bytes([value & 0x7F | 0x80])
        value >>= 7
    return written + bytes([value])


def frame(field: int, value: bytes) -> bytes:
    """Return a field whose value has a length."""
    return number(field << 3 | 2) + number(len(value)) + value


def request_types() -> dict[str, Descriptor]:
    """Return the type of every request of every service, the standard ones' too."""
    ours = {request.full_name: request for _, request, _ in methods()}
    health, reflection = health_pb2.HealthCheckRequest, reflection_pb2.ServerReflectionRequest
    others: list[Any] = [health.DESCRIPTOR, reflection.DESCRIPTOR]
    return ours | {kind.full_name: kind for kind in others}


def overfull(request: Descriptor, nbytes: int) -> Iterator[Overfull]:
    """Yield a request of about so many bytes for each way to overfill each of its fields."""
    yield from _within(request, (), nbytes)


def _within(
    message: Descriptor, around: tuple[FieldDescriptor, ...], nbytes: int
) -> Iterator[Overfull]:
    here = ".".join((*(field.name for field in around), "?"))
    unknown = _repeat_entry(number(UNKNOWN << 3) + b"\0", nbytes)
    yield Overfull(here, "unknown", _wrap(unknown, around))
    yield Overfull(here, "unknown text", _wrap(frame(UNKNOWN, b"x" * nbytes), around))
    for field in message.fields:
        path = ".".join(part.name for part in (*around, field))
        for how, raw in _ways(field, nbytes):
            yield Overfull(path, how, _wrap(raw, around), is_list=field.is_repeated)
        lists = [place for place, outer in enumerate(around) if outer.is_repeated]
        if lists:  # one in each of many entries
            outer, inner = around[: lists[0]], around[lists[0] :]
            raw = _repeat_entry(_wrap(_entry(field), inner), nbytes)
            yield Overfull(path, "in many", _wrap(raw, outer), is_list=field.is_repeated)
        if field.message_type is not None and field not in around:
            yield from _within(field.message_type, (*around, field), nbytes)


def _ways(field: FieldDescriptor, nbytes: int) -> Iterator[tuple[str, bytes]]:
    """Yield how one field is overfilled; a single one may come as often as one likes, too."""
    yield "many", _repeat_entry(_entry(field), nbytes)
    if field.type in TEXTS:
        yield "one", frame(field.number, b"x" * nbytes)
        yield "no text", frame(field.number, b"\xff" * nbytes)
    elif field.is_repeated and field.message_type is None:
        yield "packed", frame(field.number, b"\x01" * nbytes)


def _entry(field: FieldDescriptor) -> bytes:
    """Return the least that counts as a value of a field."""
    if field.type in TEXTS or field.message_type is not None:
        return frame(field.number, b"")
    kind = FIXED.get(field.type, 0)
    return number(field.number << 3 | kind) + b"\x01" * {0: 1, 5: 4, 1: 8}[kind]


def _repeat_entry(entry: bytes, nbytes: int) -> bytes:
    return entry * (nbytes // len(entry))


def _wrap(raw: bytes, around: tuple[FieldDescriptor, ...]) -> bytes:
    for field in reversed(around):
        raw = frame(field.number, raw)
    return raw


ATTACKS: dict[str, bytes] = {
    "empty messages": frame(4, b"\x0a\x00" * (5 * MILLION)),
    "empty stops": frame(2, b"x") + b"\x42\x00" * (5 * MILLION),
    "biases": frame(2, b"x") + frame(5, b"\x62\x02\x08\x01" * (2 * MILLION)),
    "unknown fields": frame(2, b"x") + b"\xfa\x7f\x00" * (3 * MILLION),
    "calls": frame(4, frame(1, b"\x32\x00" * (5 * MILLION))),
    "choices": frame(2, b"x") + frame(14, frame(5, b"\x0a\x00" * (5 * MILLION))),
    "stop ids": frame(2, b"x") + frame(9, b"\x01" * (10 * MILLION)),
    "resumed": frame(2, b"x") + frame(19, b"\x01" * (10 * MILLION)),
    "options again and again": frame(2, b"x") + b"\x2a\x00" * (5 * MILLION),
    "prompts again and again": b"\x12\x00\x1a\x00" * (2 * MILLION),
    "numbers of ten bytes": (number(2047 << 3) + b"\xff" * 9 + b"\x01") * MILLION,
    "groups": b"\xfb\x7f" * (5 * MILLION),
}
"""Generates of millions of parts each; cut to what a server takes, they are no other."""
