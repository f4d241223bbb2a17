"""What an answer is made of, and what a family of models has to tell about it.

Invariants, of every parser
- What it has given out after some text depends on that text alone, not on how it came in pieces.
- Every character comes out, but for the marks and the blanks beside them: what looks like a call
  and is none comes out as text, marks and all.
- A call is whole JSON, in whole characters: one whose end is missing is none, unless what is there
  shows that nothing is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from mlxd_shared.domain.chats import json_object

_BLANKS: Final = re.compile(r"\s*")


@dataclass(frozen=True, slots=True)
class Said:
    """Text, or thought."""

    text: str
    reasoning: bool = False


@dataclass(frozen=True, slots=True)
class Called:
    """A whole call; `arguments_json` is a JSON object."""

    name: str
    arguments_json: str


Piece = Said | Called


@dataclass(frozen=True, slots=True)
class Tools:
    """The tools on offer: of each the types of its parameters, as JSON schema names them."""

    types: Mapping[str, Mapping[str, object]] = field(default_factory=dict)

    @property
    def offered(self) -> bool:
        """Whether there are any, and calls are looked for."""
        return bool(self.types)

    def value(self, tool: str, parameter: str, text: str) -> Any:  # noqa: ANN401 - of JSON
        """Return what a bare text means for a parameter: itself, where it is to be a string."""
        if self.types.get(tool, {}).get(parameter) == "string":
            return text
        try:
            value = json.loads(text)
            write_arguments(value)
        except (ValueError, RecursionError):  # not JSON, or only to the library
            return text
        return value


def tools_of(tools_json: Sequence[str]) -> Tools:
    """Return the tools that a conversation offers; each text is a JSON object."""
    types: dict[str, dict[str, object]] = {}
    for text in tools_json:
        tool = json_object(text)
        function = tool.get("function", tool)
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            continue  # of another kind than a function
        parameters = function.get("parameters")
        properties = parameters.get("properties") if isinstance(parameters, dict) else None
        types[function["name"]] = {
            name: schema.get("type")
            for name, schema in (properties if isinstance(properties, dict) else {}).items()
            if isinstance(schema, dict)
        }
    return Tools(types)


@dataclass(frozen=True, slots=True)
class Begin:
    """Where an answer begins."""

    reasoning: bool = False
    """Within reasoning, which the prompt has opened."""
    middle: bool = False
    """Within its text, with which the prompt ends."""


class Parser(Protocol):
    """Reads one answer. Real: `MarkedParser`, `HarmonyParser`."""

    def push(self, text: str) -> list[Piece]:
        """Take the next text; return the pieces that are certain."""

    def finish(self) -> list[Piece]:
        """Return what was held back: the answer is over."""


@dataclass(frozen=True, slots=True)
class Think:
    """The marks around reasoning."""

    open: str
    close: str


@dataclass(frozen=True, slots=True)
class CallSyntax:
    """How a family writes calls.

    Between `open` and `close` is a body that `decode` reads; it raises ValueError or RecursionError
    for what is no call. Without a `close` a body ends where the next begins, or the answer ends.
    """

    open: str
    close: str | None
    decode: Callable[[str, Tools], list[Called]]
    json: bool = False
    """Whether what is quoted in a body is a string of JSON."""
    last: str | None = ""
    """What ends a body that is whole though the answer ends before `close`; None: nothing does."""

    def read(self, body: str, tools: Tools) -> list[Called] | None:
        """Return the calls of a body; None where it holds something else."""
        try:
            return self.decode(body, tools) or None
        except (ValueError, RecursionError):
            return None

    def is_whole(self, body: str) -> bool:
        """Return whether nothing of a body can be missing but its `close`."""
        return self.last is not None and body.rstrip().endswith(self.last)


def call_of(item: object) -> Called:
    """Return the call that a JSON value describes by `name` and `arguments` or `parameters`.

    Raises:
        ValueError: it describes none.
    """
    match item:
        case {"name": str(name), **rest}:
            arguments = rest.get("arguments", rest.get("parameters", {}))
        case _:
            raise ValueError("not an object with a name")
    match arguments:
        case str():
            return make_call(name, json_object(arguments or "{}"))
        case dict():
            return make_call(name, arguments)
    raise ValueError("arguments that are not an object")


def make_call(name: str, arguments: dict[str, Any]) -> Called:
    """Return a call; raises ValueError if it has no name, or cannot be written as JSON."""
    if not name:
        raise ValueError("a call without a name")
    name.encode()
    return Called(name, write_arguments(arguments))


def write_arguments(arguments: object) -> str:
    """Return a call's arguments as JSON, as templates write it.

    Raises:
        ValueError: a number that JSON has not, half a character, or nested too deep.
    """
    try:
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except RecursionError as error:
        raise ValueError("nested too deep") from error
    text.encode()
    return text


def blank_end(text: str, place: int) -> int:
    """Return where the blanks at a place end."""
    match = _BLANKS.match(text, place)
    assert match is not None, "no blanks are blanks, too"
    return match.end()


def between(text: str, place: int, opened: str, closed: str) -> tuple[str, int] | None:
    """Return what stands between two marks and the place behind them.

    The first one begins at `place`, but for blanks; else there is None.
    """
    begin = blank_end(text, place)
    end = text.find(closed, begin + len(opened)) if text.startswith(opened, begin) else -1
    return None if end < 0 else (text[begin + len(opened) : end], end + len(closed))


def overlap(text: str, mark: str) -> int:
    """Return how many characters at the end of `text` begin `mark`."""
    most = min(len(text), max(len(mark) - 1, 0))
    return next((n for n in range(most, 0, -1) if mark.startswith(text[-n:])), 0)
