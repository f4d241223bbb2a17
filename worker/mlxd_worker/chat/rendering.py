"""From a conversation to its text, and where and why a template fails on one.

Runs in the process of `render_process`, as `environment` does.

Invariants:
- The text is, byte for byte, what the field's reference renderer makes of the same conversation.
- A template's own exception does not get further than this: what is raised instead names the line,
  and the message and its field where it is them that the template cannot do with.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType

import jinja2

from mlxd_worker.chat.call_forms import CallForms, Message, call_forms, form_message
from mlxd_worker.chat.environment import Refusal, TooLong, Variables, render
from mlxd_worker.chat.list_contents import list_content, wants_lists


class NotContinued(Exception):
    """A template that does not write the last message where it could be gone on with."""


@dataclass(slots=True, eq=False)
class TemplateFault(Exception):
    """A template that cannot render a conversation."""

    problem: str
    line: int | None = None
    """A line of the template; None if the error is elsewhere."""
    field: str = ""
    """Of a message (`messages[2].content`), where the template can do without it or with it."""


def render_chat(
    template: str,
    variables: Variables,
    *,
    now_s: float,
    chars_max: int,
    continues: bool,
    sees: bool = False,
) -> str:
    """Return the text of a conversation (`variables["messages"]`) as the template wants it.

    Content that is None stands for none; arguments of calls are objects. continues: the text ends
    within the last message, behind its content. sees: content that is a text becomes a list of one
    part where the template writes it only so.

    Raises:
        NotContinued: that content is not where it could be gone on with.
        TemplateFault: the template cannot render it.
        TooLong: above `chars_max`.
        Refusal: the template's own error.
        jinja2.TemplateSyntaxError: it is no template.
        MemoryError, RecursionError: it takes more of them than there is.
    """
    rendering = _Rendering(template, variables, now_s, chars_max, sees)
    messages: list[Message] = variables["messages"]
    if not continues:
        return rendering.text(messages)
    tag = "".join(secrets.choice("0123456789") for _ in range(32))
    last = messages[-1]
    # The blank tells whether the template keeps the spacing at a message's end.
    tagged = [*messages[:-1], {**last, "content": f"{last['content'] or ''}{tag} "}]
    head, marker, tail = rendering.text(tagged, more_chars=len(tag)).rpartition(tag)
    if not marker:
        raise NotContinued
    return head if tail.startswith(" ") else head.rstrip()


@dataclass(frozen=True, slots=True)
class _Rendering:
    """One template with all that it is given but the messages."""

    template: str
    variables: Variables
    now_s: float
    chars_max: int
    sees: bool = False

    def text(self, messages: list[Message], *, more_chars: int = 0) -> str:
        """Return the text of messages whose missing contents are None."""
        forms = CallForms()
        if any("tool_calls" in message for message in messages):
            forms = call_forms(self.template, self._special())
        if self.sees and wants_lists(self.template, self._special()):
            messages = [list_content(message) for message in messages]
        formed_messages = [form_message(message, forms) for message in messages]
        try:
            text = self._render(formed_messages, more_chars)
        except _CLEAR:
            raise
        except Exception as error:
            line, index = _place(error, formed_messages)
            field = self._field(messages, index, forms)
            raise TemplateFault(f"{type(error).__name__}: {error}", line, field) from error
        if forms.alone is None:
            # It would be rendered, but not without text that no message contains.
            for index, message in enumerate(messages):
                if "tool_calls" in message and message["content"] is None:
                    problem = "the template takes no calls without content beside them"
                    raise TemplateFault(problem, None, f"messages[{index}].content")
        return text

    def _field(self, messages: list[Message], index: int | None, forms: CallForms) -> str:
        """Return the field without which, or with which, the template gets on; empty: none."""
        if index is None:
            indexes = [i for i, message in enumerate(messages) if "tool_calls" in message][:1]
        else:
            indexes = [index]
        for i in indexes:
            for name, changed in _changes(messages[i]):
                formed_messages = [form_message(message, forms) for message in messages]
                formed_messages[i] = form_message(changed, forms)
                try:
                    self._render(formed_messages, 0)
                except Exception as error:  # noqa: BLE001 - it still fails, here or further on
                    _, later = _place(error, formed_messages)
                    if later is None or later <= i:
                        continue
                return f"messages[{i}].{name}"
        return ""

    def _render(self, messages: list[Message], more_chars: int) -> str:
        variables, most = {**self.variables, "messages": messages}, self.chars_max + more_chars
        return render(self.template, variables, now_s=self.now_s, chars_max=most)

    def _special(self) -> tuple[tuple[str, str], ...]:
        """Return the special tokens among the variables: all of them that a probe needs."""
        return tuple(
            (name, value)
            for name, value in sorted(self.variables.items())
            if name.endswith("_token") and isinstance(value, str)
        )


_CLEAR = (Refusal, TooLong, MemoryError, RecursionError, jinja2.TemplateSyntaxError)
"""What says enough by itself."""


def _changes(message: Message) -> Iterator[tuple[str, Message]]:
    """Yield fields with the message as it were if they were there, or were not."""
    if message["content"] is None:
        yield "content", {**message, "content": "x"}
    if "tool_calls" in message:
        bare = {name: value for name, value in message.items() if name != "tool_calls"}
        yield "tool_calls", {**bare, "content": message["content"] or ""}
    answers = message["role"] == "assistant"
    optional = {"reasoning": ("reasoning_content", "thinking")} if answers else {}
    for name, keys in {**optional, "name": ("name",), "tool_call_id": ("tool_call_id",)}.items():
        if keys[0] in message:
            yield name, {key: value for key, value in message.items() if key not in keys}
        else:
            yield name, {**message, **dict.fromkeys(keys, "x")}


def _place(error: BaseException, messages: list[Message]) -> tuple[int | None, int | None]:
    """Return the template's line that failed, and which message it was at.

    jinja2 gives an exception the frames of the template itself, with its variables as locals.
    """
    numbers = {id(message): index for index, message in enumerate(messages)}
    line = index = None
    traceback: TracebackType | None = error.__traceback__
    while traceback is not None:
        frame = traceback.tb_frame
        if "__jinja_exception__" in frame.f_globals:
            line = traceback.tb_lineno
            at = [numbers[id(value)] for value in frame.f_locals.values() if id(value) in numbers]
            # A template may keep the one before or the first by another name.
            index = max(at, default=index)
        traceback = traceback.tb_next
    return line, index
