"""How a chat template is rendered: the sandbox, and what templates of the field expect in it.

Runs in the process of `render_process` and nowhere else: a template is a program that came with a
model. The sandbox keeps it from the interpreter; that process bounds its time and its memory.

Invariants:
- The text is, byte for byte, what the field's reference renderer makes of the same variables.
- A template that wants the arguments of calls as text, or no content beside calls, gets them so:
  it is asked once with a made-up call (`call_form`).
"""

from __future__ import annotations

import datetime as dt
import functools
import json
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

TEMPLATES_KEPT_MAX: Final = 8

Variables = Mapping[str, Any]


class Refusal(jinja2.TemplateError):
    """A template that says itself what is wrong with a conversation."""


class TooLong(Exception):
    """A rendering above its bound."""


class NotContinued(Exception):
    """A template that does not write the last message where it could be gone on with."""


@dataclass(frozen=True, slots=True)
class CallForm:
    """How a template wants an assistant's calls."""

    arguments_as_text: bool = False
    """Their arguments as JSON text rather than an object."""
    empty_content: bool = False
    """A message without content has an empty one rather than none."""


class _Generation(Extension):
    """`{% generation %}`, which marks what an assistant has said, and changes nothing."""

    tags = {"generation"}  # noqa: RUF012 - as the library declares it

    def parse(self, parser: Parser) -> nodes.Node:
        """Read the block up to its end."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_as_it_is"), [], [], body).set_lineno(line)

    def _as_it_is(self, caller: Macro) -> str:
        text: str = caller()
        return text


class _Namespace(Namespace):
    """A namespace without attributes that begin with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - whatever a template has
        self, rest = args[0], args[1:]
        values = dict(*rest, **kwargs)
        for name in values:
            _check_attribute(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:  # noqa: ANN401 - whatever a template has
        _check_attribute(name)
        Namespace.__setitem__(self, name, value)


class _Dict:
    """`dict`, as a template may use it, without the class itself."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:  # noqa: ANN401 - likewise
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:  # noqa: ANN401 - likewise
        """Return a dict of these keys."""
        return dict.fromkeys(*args)


def _check_attribute(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        message = f"a namespace holds no {name!r}: names with an underscore first are refused"
        raise jinja2.exceptions.SecurityError(message)


def _raise_exception(message: str) -> None:
    raise Refusal(message)


def _tojson(
    value: Any,  # noqa: ANN401 - whatever a template has
    ensure_ascii: bool = False,  # noqa: FBT001, FBT002 - the signature is the field's
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,  # noqa: FBT001, FBT002 - likewise
) -> str:
    """Return JSON as it is, where the library's own filter would escape it for HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


@functools.cache
def environment() -> ImmutableSandboxedEnvironment:
    """Return the sandbox with the filters and functions that templates count on."""
    made = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_Generation, LoopControlExtension],
    )
    made.filters["tojson"] = _tojson
    made.globals |= {
        "raise_exception": _raise_exception,
        "dict": _Dict(),
        "namespace": _Namespace,
    }
    return made


@functools.lru_cache(maxsize=TEMPLATES_KEPT_MAX)
def compiled(template: str) -> jinja2.Template:
    """Return a template, compiled.

    Raises:
        jinja2.TemplateSyntaxError: with the line.
    """
    return environment().from_string(template)


def render(template: str, variables: Variables, *, now_s: float, chars_max: int) -> str:
    """Return the text that a template makes of `variables`.

    now_s: the time that it is told, in seconds since the epoch; it is shown in the local zone.

    Raises:
        TooLong: above `chars_max`.
        Exception: whatever the template runs into.
    """
    told = {**variables, "strftime_now": _clock(now_s)}
    pieces: list[str] = []
    room = chars_max
    for piece in compiled(template).generate(told):
        room -= len(piece)
        if room < 0:
            raise TooLong
        pieces.append(piece)
    return "".join(pieces)


def render_chat(
    template: str, variables: Variables, *, now_s: float, chars_max: int, continues: bool
) -> str:
    """Return the text of a conversation (`variables["messages"]`) as the template wants it.

    Content that is None stands for none; arguments of calls are objects. continues: the text ends
    within the last message, behind its content.

    Raises:
        NotContinued: that content is not where it could be gone on with.
        Exception: as `render`.
    """
    messages: list[dict[str, Any]] = variables["messages"]
    if any("tool_calls" in message for message in messages):
        form = call_form(template, _hashable(variables))
        messages = [_formed(message, form) for message in messages]
    if not continues:
        whole = {**variables, "messages": messages}
        return render(template, whole, now_s=now_s, chars_max=chars_max)
    tag = "".join(secrets.choice("0123456789") for _ in range(32))
    last = messages[-1]
    # The blank tells whether the template keeps the spacing at a message's end.
    tagged = [*messages[:-1], {**last, "content": f"{last['content'] or ''}{tag} "}]
    text = render(
        template, {**variables, "messages": tagged}, now_s=now_s, chars_max=chars_max + len(tag)
    )
    head, found, tail = text.rpartition(tag)
    if not found:
        raise NotContinued
    return head if tail.startswith(" ") else head.rstrip()


@functools.lru_cache(maxsize=TEMPLATES_KEPT_MAX)
def call_form(template: str, special: tuple[tuple[str, str], ...] = ()) -> CallForm:
    """Return the first form of calls under which a made-up one is written as a call."""
    for form in (
        CallForm(),
        CallForm(empty_content=True),
        CallForm(arguments_as_text=True),
        CallForm(arguments_as_text=True, empty_content=True),
    ):
        messages = [_formed(message, form) for message in _PROBE]
        variables = {
            "tools": _PROBE_TOOLS,
            "add_generation_prompt": True,
            **dict(special),
            "messages": messages,
        }
        try:
            text = render(template, variables, now_s=0.0, chars_max=1 << 20)
        except Exception:  # noqa: BLE001, S112 - whatever it runs into, it is not the form
            continue
        if "probekey" in text and "{'probekey'" not in text and "None" not in text:
            return form
    return CallForm()


_PROBE: Final[tuple[dict[str, Any], ...]] = (
    {"role": "user", "content": "a"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "type": "function",
                "id": "abc123def",
                "function": {"name": "f", "arguments": {"probekey": "b"}},
            }
        ],
    },
    {"role": "tool", "content": "c", "tool_call_id": "abc123def", "name": "f"},
)
_PROBE_TOOLS: Final = [
    {
        "type": "function",
        "function": {
            "name": "f",
            "description": "d",
            "parameters": {"type": "object", "properties": {}, "required": []},
        },
    }
]


def _formed(message: dict[str, Any], form: CallForm) -> dict[str, Any]:
    """Return a message with its calls in a form."""
    calls = message.get("tool_calls")
    if calls is None:
        return message
    if form.arguments_as_text:
        calls = [_with_text(call) for call in calls]
    content = message["content"]
    if content is None and form.empty_content:
        content = ""
    return {**message, "content": content, "tool_calls": calls}


def _with_text(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    return {**call, "function": {**function, "arguments": _tojson(function["arguments"])}}


def _hashable(variables: Variables) -> tuple[tuple[str, str], ...]:
    """Return the special tokens among the variables: all of them that a made-up chat needs."""
    return tuple(
        (name, value)
        for name, value in sorted(variables.items())
        if name.endswith("_token") and isinstance(value, str)
    )


def _clock(now_s: float) -> Callable[[str], str]:
    moment = dt.datetime.fromtimestamp(now_s).astimezone().replace(tzinfo=None)

    def strftime_now(wanted: str) -> str:
        return moment.strftime(wanted)

    return strftime_now
