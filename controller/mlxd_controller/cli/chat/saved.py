"""Conversations on disk: `/save NAME` and `/load NAME`, in a folder that only its user reads.

    {"version": 1, "model": "demo", "system": "", "variables": {}, "messages": [{"role": ...}]}

A message is written as the wire's JSON has it: an image as base64.

Invariants:
- A save replaces what was saved under the name as a whole, or not at all.
- What is loaded is checked whole before anything of it is taken.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mlxd_shared.config import SAVED_CHAT_BYTES_MAX
from mlxd_shared.domain.chats import ROLES, ChatMessage, ContentPart, half_character
from mlxd_shared.ops.state_file import OWNERS, replace_text
from mlxd_shared.wire.convert_chat import messages_from_json

VERSION = 1
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", re.ASCII)


class ChatNotUsable(Exception):
    """Why a chat can be neither saved nor loaded, for its user."""


@dataclass(frozen=True, slots=True)
class SavedChat:
    """A conversation and what it was held with."""

    model: str
    system: str
    variables: Mapping[str, Any]
    messages: tuple[ChatMessage, ...]


def save(folder: Path, name: str, chat: SavedChat) -> Path:
    """Write a chat under a name and return its file.

    Raises:
        ChatNotUsable: the name is none, the chat is too long, or the file cannot be written.
    """
    path = path_of(folder, name)
    content = {
        "version": VERSION,
        "model": chat.model,
        "system": chat.system,
        "variables": dict(chat.variables),
        "messages": [_to_json(message) for message in chat.messages],
    }
    text = json.dumps(content, indent=1) + "\n"
    if len(text) > SAVED_CHAT_BYTES_MAX:
        raise ChatNotUsable(f"the chat has {len(text)} bytes; at most {SAVED_CHAT_BYTES_MAX}")
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        replace_text(path, text, mode=OWNERS)
    except OSError as error:
        raise ChatNotUsable(f"{path}: cannot be written: {error.strerror}") from error
    return path


def load(folder: Path, name: str) -> SavedChat:
    """Return the chat that was saved under a name.

    Raises:
        ChatNotUsable: there is none, or its file is no saved chat.
    """
    path = path_of(folder, name)
    try:
        with path.open("rb") as file:
            raw = file.read(SAVED_CHAT_BYTES_MAX + 1)
    except FileNotFoundError:
        known = ", ".join(list_names(folder)) or "none"
        raise ChatNotUsable(f"no chat is saved as {name}; saved: {known}") from None
    except OSError as error:
        raise ChatNotUsable(f"{path}: cannot be read: {error.strerror}") from error
    if len(raw) > SAVED_CHAT_BYTES_MAX:
        raise ChatNotUsable(f"{path}: at most {SAVED_CHAT_BYTES_MAX} bytes are read")
    try:
        return _parse(json.loads(raw))
    except (ValueError, RecursionError) as error:
        raise ChatNotUsable(f"{path}: is no saved chat: {error}") from error


def list_names(folder: Path) -> list[str]:
    """Return the names that chats are saved under."""
    try:
        names = [path.stem for path in folder.glob("*.json")]
    except OSError:
        return []
    return sorted(name for name in names if _NAME.fullmatch(name))


def path_of(folder: Path, name: str) -> Path:
    """Return the file of a name.

    Raises:
        ChatNotUsable: it is no name.
    """
    if not _NAME.fullmatch(name):
        raise ChatNotUsable(f"{name!r:.80} is no name: letters, digits, dot, dash, underscore")
    return folder / f"{name}.json"


def _to_json(message: ChatMessage) -> dict[str, object]:
    """Return what a message says; what is empty is left out."""
    said = asdict(message) | {"parts": [_part_to_json(part) for part in message.parts]}
    return {name: value for name, value in said.items() if value}


def _part_to_json(part: ContentPart) -> dict[str, str]:
    """Return a part by its kind: one that said both would be none on the wire."""
    if part.image is None:
        return {"text": part.text}
    image = {"image": base64.b64encode(part.image).decode()}
    return image | ({"media_type": part.media_type} if part.media_type else {})


def _parse(content: object) -> SavedChat:
    """Return the chat that JSON holds.

    Raises:
        ValueError: it is none.
    """
    if not isinstance(content, dict) or content.get("version") != VERSION:
        raise ValueError(f"not of version {VERSION}")
    if content.keys() != {"version", "model", "system", "variables", "messages"}:
        raise ValueError(f"keys {', '.join(map(str, content))}")
    if not isinstance(content["variables"], dict):
        raise ValueError("variables are of another kind")  # noqa: TRY004
    _check_no_null(content["messages"])
    messages = messages_from_json(content["messages"])
    if any(message.role not in ROLES for message in messages):
        raise ValueError("a message of nobody")
    if not all(call.name for message in messages for call in message.tool_calls):
        raise ValueError("a call of nothing")
    model, system = _text(content["model"]), _text(content["system"])
    return SavedChat(model, system, content["variables"], messages)


def _check_no_null(written: object) -> None:
    """Check that messages are a list whose fields say something: as protobuf, null would be none.

    Raises:
        ValueError: naming the field.
    """
    if not isinstance(written, list):
        raise ValueError("messages are no list")  # noqa: TRY004
    for index, message in enumerate(written):
        for name, value in message.items() if isinstance(message, dict) else ():
            if value is None:
                raise ValueError(f"messages[{index}].{name!s:.40} is null")


def _text(value: object) -> str:
    if not isinstance(value, str) or half_character(value):
        raise ValueError(f"{value!r:.40} is no text")
    return value
