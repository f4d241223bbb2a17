"""Walks the descriptors: which fields can a client send, which can it get, which did it see."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

from google.protobuf.descriptor import Descriptor, FieldDescriptor, FileDescriptor
from google.protobuf.message import Message

from mlxd.v1 import inference_pb2, model_pb2, status_pb2, worker_pb2

M = TypeVar("M", bound=Message)

FILES: tuple[FileDescriptor, ...] = (
    inference_pb2.DESCRIPTOR,
    model_pb2.DESCRIPTOR,
    status_pb2.DESCRIPTOR,
    worker_pb2.DESCRIPTOR,
)


def _fields(message: Descriptor, seen: set[str]) -> Iterator[FieldDescriptor]:
    """Yield the fields of `message` and of ours inside it; maps and well-known types are leaves."""
    if message.full_name in seen or not message.full_name.startswith("mlxd."):
        return
    seen.add(message.full_name)
    for field in message.fields:
        yield field
        inner = field.message_type
        if inner is not None and not inner.GetOptions().map_entry:
            yield from _fields(inner, seen)


def _names(roots: list[Descriptor]) -> set[str]:
    seen: set[str] = set()
    return {field.full_name for root in roots for field in _fields(root, seen)}


def methods() -> Iterator[tuple[str, Descriptor, Descriptor]]:
    """Yield full name, request and response of every method."""
    for file in FILES:
        for service in file.services_by_name.values():
            for method in service.methods:
                yield method.full_name, method.input_type, method.output_type


def request_fields() -> set[str]:
    """Return the full name of every field that a client can send."""
    return _names([request for _, request, _ in methods()])


def response_fields() -> set[str]:
    """Return the full name of every field that a client can get."""
    return _names([response for _, _, response in methods()])


def fields_of(message: Descriptor) -> set[str]:
    """Return the full names of the fields of `message` alone."""
    return {field.full_name for field in message.fields}


class Recorder:
    """Remembers every field that was set in some message it saw."""

    def __init__(self) -> None:
        self.seen: set[str] = set()

    def see(self, message: M) -> M:
        """Note the fields that are set in `message`, and return it."""
        for field, value in message.ListFields():
            self.seen.add(field.full_name)
            inner = field.message_type
            if inner is None or inner.GetOptions().map_entry:
                continue
            for part in value if field.is_repeated else [value]:
                self.see(part)
        return message
