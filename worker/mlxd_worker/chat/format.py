"""One model's way with chats: from a conversation to a rendering job, and on to the prompt's ids.

Invariants:
- Every text that a person wrote is marked before the template sees it (`control_tokens`); only an
  assistant's content may hold the marks of the model's own output that are no special tokens.
- Nothing is put before or behind what the template writes: a BOS comes once, from the template.
- Any thread; immutable.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from mlxd_models.files.chat_template import ChatTemplate
from mlxd_shared import config
from mlxd_shared.domain.chats import (
    ASSISTANT,
    Chat,
    ChatMessage,
    ToolCall,
    chat_images,
    json_object,
    refuse_half_characters,
)
from mlxd_shared.domain.errors import InvalidRequest
from mlxd_worker.chat.parsing.registry import OutputFormat, output_format
from mlxd_worker.text.control_tokens import ControlTokens, new_nonce
from mlxd_worker.text.tokenizer import Tokenizer, library_faults

TAIL_CHARS: Final = 64
"""Of a prompt, enough to see whether it ends with a mark."""


@dataclass(frozen=True, slots=True)
class Job:
    """A conversation to render; `nonce` marks what people wrote in it."""

    template: str
    variables: dict[str, Any]
    now_s: float
    continues: bool
    nonce: str
    file: str
    """Where the model has that template."""
    sees: bool = False
    """Whether the template may want contents as lists of parts."""


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation as the model reads it."""

    ids: Sequence[int]
    text: str
    """Likewise; spellings in it may be a person's."""
    tail: str = ""
    """Its end, in which a person's spellings of control tokens are broken up."""


class ChatFormat:
    """What one model's files say about chats."""

    def __init__(
        self,
        template: ChatTemplate,
        tokenizer: Tokenizer,
        *,
        chars_max: int = config.PROMPT_CHARS_MAX,
        sees: bool = False,
        image_ids: tuple[int, int, int] | None = None,
    ) -> None:
        """Prepare; takes about as long as reading the tokenizer.

        chars_max: no longer prompt fits the context; one is refused before it is encoded.
        sees: whether the model takes images. image_ids: where its template writes for an image the
        first of these tokens alone, what stands for it all.

        Raises:
            InvalidModel: an added token of the tokenizer is too long to steer a chat.
        """
        self.template = template
        self._chars_max = chars_max
        self._sees = sees
        written = f"{template.text}\n{template.tool_text}"
        named = sorted({text for _, text in template.special})
        self.tokenizer = tokenizer
        self.steering: dict[str, Any] = {"written": written, "named": named}
        """What another process makes the same control tokens of."""
        self.control: ControlTokens = tokenizer.control_tokens(**self.steering)
        self._image = None if image_ids is None else _spell_image(image_ids, self.control.ids)
        self.output: OutputFormat = output_format(written)
        """How the model's answers are told apart."""
        self._allowed = frozenset(self.output.marks) - self.control.special
        self.shown = self.control.ids_of(self.output.marks)
        """The tokens that are marks of the model's output, and their spellings."""

    def job(self, chat: Chat) -> Job:
        """Return what is to be rendered.

        Raises:
            InvalidRequest: JSON that is nested too deep, or a text that is none.
        """
        refuse_half_characters(chat)
        nonce = new_nonce()
        mark = partial(self.control.mark, nonce=nonce)
        mark_answer = partial(self.control.mark, nonce=nonce, allowed=self._allowed)
        try:
            tools = [_tool(_mark(json_object(text), mark)) for text in chat.offered]
            variables = _mark(json_object(chat.variables_json or "{}"), mark)
            messages = _messages(chat, mark, mark_answer)
        except RecursionError as error:
            raise InvalidRequest.of("chat", "nested too deep") from error
        return Job(
            template=self.template.tool_text if tools else self.template.text,
            variables={
                "documents": None,
                **dict(self.template.special),
                **variables,
                "tools": tools or None,
                "add_generation_prompt": chat.begins_answer,
                "messages": messages,
            },
            now_s=time.time() if chat.now_s is None else chat.now_s,
            continues=chat.continues,
            nonce=nonce,
            file=self.template.file_of(with_tools=bool(tools)),
            sees=self._sees,
        )

    def show(self, chat: Chat, rendered: str) -> str:
        """Return a rendering in which images have all that stands for them.

        What people wrote is marked, so that none of it is taken for the template's.
        """
        if self._image is None or not any(chat_images(chat)):
            return rendered
        return rendered.replace(*self._image)

    def encode(self, rendered: str, nonce: str) -> list[int]:
        """Return the ids of a rendered job; raises InvalidModel if the tokenizer cannot."""
        with library_faults("cannot read a chat"):
            return self.control.encode(rendered, nonce)

    def prompt(self, rendered: str, nonce: str) -> ChatPrompt:
        """Return the prompt of a rendered job but for its ids, in time in proportion to the text.

        Raises:
            InvalidRequest: it is too long for any tokens of the context.
        """
        text, tail = rendered.replace(nonce, ""), rendered.rstrip()[-TAIL_CHARS:]
        if len(text) > self._chars_max:
            limit = f"the prompt has {len(text)} characters; the context takes at most"
            raise InvalidRequest.of("chat", f"{limit} {self._chars_max}")
        return ChatPrompt((), text, tail)


_Mark = Callable[[str], str]


def _spell_image(
    image_ids: tuple[int, int, int], control: Mapping[str, int]
) -> tuple[str, str] | None:
    """Return what a template writes for an image, and all that stands for it: on lines of its own.

    As Gemma 3's processor has it, in characters: line ends beside it are one token with its own.
    None: not all are control tokens, and the model is refused by them.
    """
    spelled = {token_id: text for text, token_id in control.items()}
    if not spelled.keys() >= set(image_ids):
        return None
    before, place, behind = (spelled[token_id] for token_id in image_ids)
    return before, f"\n\n{before}{place}{behind}\n\n"


def _messages(chat: Chat, mark: _Mark, mark_answer: _Mark) -> list[dict[str, Any]]:
    """Return the messages as templates know them; a tool's answer has its tool's name."""
    names = {call.id: call.name for message in chat.messages for call in message.tool_calls}
    messages: list[dict[str, Any]] = []
    for message in chat.messages:
        item: dict[str, Any] = {"role": message.role}
        if message.role == ASSISTANT:
            item |= _answer(message, mark, mark_answer)
        else:
            item["content"] = _parts(message, mark) if message.images else mark(message.text)
        if message.tool_call_id:
            item["tool_call_id"] = mark(message.tool_call_id)
        name = message.name or names.get(message.tool_call_id, "")
        if name and (message.name or message.role == "tool"):
            item["name"] = mark(name)
        messages.append(item)
    return messages


def _parts(message: ChatMessage, mark: _Mark) -> list[dict[str, str]]:
    """Return the parts of a message that shows images, as templates know them."""
    return [
        {"type": "text", "text": mark(part.text)} if part.image is None else {"type": "image"}
        for part in message.parts
    ]


def _answer(message: ChatMessage, mark: _Mark, mark_answer: _Mark) -> dict[str, Any]:
    """Return what an assistant's message has; no content beside calls is None."""
    item: dict[str, Any] = {"content": mark_answer(message.text)}
    if message.reasoning:
        item["reasoning_content"] = item["thinking"] = mark(message.reasoning)
    if message.tool_calls:
        item["content"] = item["content"] or None
        item["tool_calls"] = [_call(call, mark) for call in message.tool_calls]
    return item


def _call(call: ToolCall, mark: _Mark) -> dict[str, Any]:
    arguments = _mark(json_object(call.arguments_json or "{}"), mark)
    function = {"name": mark(call.name), "arguments": arguments}
    named = {"id": mark(call.id)} if call.id else {}
    return {**named, "type": "function", "function": function}


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    """Return a tool as templates know it, from that or from its function alone.

    Whether its calls are held to its schema is not for the model.
    """
    if "function" not in tool and "type" in tool and "name" not in tool:
        return tool
    whole = tool if "function" in tool else {"type": "function", "function": tool}
    function = whole["function"]
    if isinstance(function, dict) and "strict" in function:
        function = {name: value for name, value in function.items() if name != "strict"}
    return {**whole, "function": function}


def _mark(value: Any, mark: _Mark) -> Any:  # noqa: ANN401 - of JSON
    """Return a value with every text in it marked, names included."""
    match value:
        case str():
            return mark(value)
        case dict():
            return {mark(key): _mark(item, mark) for key, item in value.items()}
        case list():
            return [_mark(item, mark) for item in value]
        case _:
            return value
