"""The fields that exist on the wire but are not served yet, and their neutral values.

A field set to its neutral value asks for nothing and is honoured by doing nothing; any other value
is refused by name with UNIMPLEMENTED. Serving a field means deleting its row here.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from google.protobuf.descriptor import Descriptor
from google.protobuf.message import Message

from mlxd_shared.domain.errors import FieldNotServed

# Full name of the message -> field -> the values that ask for nothing.
UNSERVED: dict[str, dict[str, tuple[object, ...]]] = {
    "mlxd.v1.LoadModelRequest": {"cancel_on_disconnect": (False,)},
}


def refuse_unserved(message: Message, *, prefix: str = "") -> None:
    """Refuse the first field of `message`, or of a message inside it, that is not served.

    Raises:
        FieldNotServed: naming the field by its path from the request.
    """
    if not _concerns(message.DESCRIPTOR):
        return
    neutral = UNSERVED.get(message.DESCRIPTOR.full_name, {})
    for field, value in message.ListFields():
        path = f"{prefix}{field.name}"
        if field.name in neutral and value not in neutral[field.name]:
            raise FieldNotServed(path)
        for inner in _messages(field, value):
            refuse_unserved(inner, prefix=f"{path}.")


@lru_cache(maxsize=256)
def _concerns(descriptor: Descriptor) -> bool:
    """Return whether there is a row for a type, or for one within it: else nothing is walked."""
    seen, left = set[str](), [descriptor]
    while left:
        kind = left.pop()
        if kind.full_name in UNSERVED:
            return True
        if kind.full_name not in seen:
            seen.add(kind.full_name)
            left += [field.message_type for field in kind.fields if field.message_type is not None]
    return False


def _messages(field: Any, value: Any) -> list[Message]:  # noqa: ANN401 - of any field
    if field.message_type is None or field.message_type.GetOptions().map_entry:
        return []
    return list(value) if field.is_repeated else [value]
