"""A conversation so far, and the options of its answers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from mlxd_controller.cli.chat.tools import Tool
from mlxd_shared.domain.chats import Chat, ChatMessage, ContentPart, json_object
from mlxd_shared.domain.requests import SamplingOptions


@dataclass(slots=True)
class Talk:
    """What is asked of the model with each message. Mutable; one owner."""

    model: str
    sampling: SamplingOptions
    max_tokens: int | None
    keep_alive_s: float | None
    stats: bool
    wrap: bool = True
    """Whether lines of answers are broken between words on a terminal."""
    system: str = ""
    variables: dict[str, Any] = field(default_factory=dict)
    """Of the chat template."""
    tools: tuple[Tool, ...] = ()
    messages: list[ChatMessage] = field(default_factory=list)
    images: tuple[ContentPart, ...] = ()
    """What the next message shows."""
    chats: bool = True
    """Whether the model has a template for chats; found out by the first message."""
    sees: bool = False
    """Whether it sees images, as the server says once it is loaded."""

    def say(self, text: str) -> ChatMessage:
        """Return the user's next message, with the images that wait for one."""
        images, self.images = self.images, ()
        if not images:
            return ChatMessage("user", text)
        return ChatMessage("user", parts=(*images, ContentPart(text)))

    def prompt(self, turn: Sequence[ChatMessage]) -> Chat | str:
        """Return the prompt for a turn: a message, then maybe calls and their results."""
        if not self.chats:
            return turn[0].text
        first = [ChatMessage("system", self.system)] if self.system else []
        return Chat(
            (*first, *self.messages, *turn),
            tools_json=tuple(tool.json_text for tool in self.tools),
            variables_json=json.dumps(self.variables) if self.variables else "",
        )

    def take_last(self) -> str:
        """Take the last message of the user's back, with all that followed; return its text.

        The images that it has shown wait for the next message.
        """
        places = [place for place, said in enumerate(self.messages) if said.role == "user"]
        said = self.messages[places[-1]]
        self.images = said.images
        del self.messages[places[-1] :]
        return said.text


def read_variable(name: str, text: str) -> object:
    """Return the value of a template's variable; what cannot be sent as JSON is a text."""
    try:
        value = json.loads(text)
        json_object(json.dumps({name: value}))
    except (ValueError, RecursionError):
        return text
    return value
