"""A response's input as it is read and as it is kept: JSON, item by item. Pure.

Invariants:
- What is kept of an input reads as an input again: each item has an id and a type, and every
  message its parts.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
from msgspec import Raw

from mlxd_gateway.common.fates import ABSENT, Foreign
from mlxd_gateway.openai.requests import Refusal
from mlxd_gateway.openai.responses import items as i

Object = dict[str, Any]
_PREFIXES = {
    i.Message: "msg",
    i.Reasoning: "rs",
    i.FunctionCall: "fc",
    i.FunctionCallOutput: "fco",
}


class _Head(msgspec.Struct):
    """What tells an item without a type from others."""

    type: Raw = ABSENT
    role: Raw = ABSENT


class _Answer(msgspec.Struct):
    """What is read again of a response that was kept."""

    output: list[i.Item]


_fields = msgspec.json.Decoder(dict[str, Raw])
_list = msgspec.json.Decoder(list[Raw])
_head = msgspec.json.Decoder(_Head)
_items = msgspec.json.Decoder(list[i.Item])
_answer = msgspec.json.Decoder(_Answer)
_encode = msgspec.json.encode


def add_types(body: bytes) -> bytes:
    """Return a request's body in which every item of the input says its type.

    Clients leave that of a message out, and of a reference to an item. A body that has no such
    input is returned as it is.
    """
    try:
        fields = _fields.decode(body)
        raw_items = _list.decode(fields.get("input", Raw(b"")))
        typed = [_add_type(item) for item in raw_items]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return body  # whoever reads it says what is wrong
    if not any(typed):
        return body
    whole = (new or bytes(old) for new, old in zip(typed, raw_items, strict=True))
    fields["input"] = Raw(b"[" + b",".join(whole) + b"]")
    return _encode(fields)


def _add_type(item: Raw) -> bytes:
    """Return an item with the type that it lacks; empty: it lacks none."""
    head = _head.decode(item)
    if bytes(head.type):
        return b""
    kind = b"message" if bytes(head.role) else b"item_reference"
    rest = bytes(item).lstrip()[1:].lstrip()
    return b'{"type":"' + kind + (b'"}' if rest == b"}" else b'",' + rest)


def write_input(sent: str | list[i.Item], unique: str) -> bytes:
    """Return an input as it is kept: a list of items in JSON. `unique` is part of new ids."""
    listed = [i.Message("user", sent)] if isinstance(sent, str) else sent
    return _encode([_write_item(item, f"{unique}_i{n}") for n, item in enumerate(listed)])


def read_items(kept: bytes) -> list[i.Item]:
    """Return the items of an input that was kept."""
    return _items.decode(kept)


def read_output(response: bytes) -> list[i.Item]:
    """Return the items of the output of a response that was kept."""
    return _answer.decode(response).output


def _write_item(item: i.Item, unique: str) -> Object:
    assert not isinstance(item, Foreign), "it was refused"
    head: Object = {
        "id": item.id or f"{_PREFIXES[type(item)]}_{unique}",
        "type": item.__struct_config__.tag,
        "status": "completed",
    }
    match item:
        case i.Message():
            return {**head, "role": item.role, "content": _write_content(item)}
        case i.Reasoning():
            return {**head, "summary": item.summary or [], "content": item.content or []}
        case i.FunctionCall():
            call = {"call_id": item.call_id, "name": item.name, "arguments": item.arguments}
            return {**head, **call}
    output = item.output if isinstance(item.output, str) else _write_parts(item.output)
    name = {} if item.name is None else {"name": item.name}
    return {**head, "call_id": item.call_id, "output": output, **name}


def _write_content(message: i.Message) -> list[Object]:
    if not isinstance(message.content, str):
        return _write_parts(message.content)
    text = message.content
    return _write_parts([i.OutputText(text) if message.role == "assistant" else i.InputText(text)])


def _write_parts(parts: Iterable[i.Part]) -> list[Object]:
    written: list[Object] = []
    for part in parts:
        match part:
            case Refusal():
                written.append({"type": "refusal", "refusal": part.refusal})
            case i.InputText():
                written.append({"type": "input_text", "text": part.text})
            case i.InputImage():
                image = {"type": "input_image", "image_url": part.image_url, "detail": "auto"}
                written.append(image)
            case i.OutputText():
                written.append({"type": "output_text", "text": part.text, "annotations": []})
    return written
