"""How a chat template is rendered: the sandbox, and what templates of the field expect in it.

Runs in the process of `render_process` and nowhere else: a template is a program that came with a
model. The sandbox keeps it from the interpreter; that process bounds its time and its memory.
"""

from __future__ import annotations

import datetime as dt
import functools
import json
from collections.abc import Callable, Mapping
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
    """A template's own error about a conversation."""


class TooLong(Exception):
    """A rendering above its bound."""


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


def to_json(
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
    sandbox = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_Generation, LoopControlExtension],
    )
    sandbox.filters["tojson"] = to_json
    sandbox.globals |= {
        "raise_exception": _raise_exception,
        "dict": _Dict(),
        "namespace": _Namespace,
    }
    return sandbox


@functools.lru_cache(maxsize=TEMPLATES_KEPT_MAX)
def compile_template(template: str) -> jinja2.Template:
    """Return a template, compiled; raises jinja2.TemplateSyntaxError, with the line."""
    return environment().from_string(template)


def render(template: str, variables: Variables, *, now_s: float, chars_max: int) -> str:
    """Return the text that a template makes of `variables`.

    now_s: the time that it is told, in seconds since the epoch; it is shown in the local zone.

    Raises:
        TooLong: above `chars_max`.
        Exception: whatever the template runs into.
    """
    variables_and_clock = {**variables, "strftime_now": _clock(now_s)}
    pieces: list[str] = []
    room = chars_max
    for piece in compile_template(template).generate(variables_and_clock):
        room -= len(piece)
        if room < 0:
            raise TooLong
        pieces.append(piece)
    return "".join(pieces)


def _clock(now_s: float) -> Callable[[str], str]:
    moment = dt.datetime.fromtimestamp(now_s).astimezone().replace(tzinfo=None)

    def strftime_now(wanted: str) -> str:
        return moment.strftime(wanted)

    return strftime_now
