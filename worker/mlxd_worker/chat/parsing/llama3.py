"""Llama 3: an answer that is JSON objects with name and parameters, or follows <|python_tag|>.

Nothing but its first characters says that an answer is a call, so one that begins like it is held
to its end. JSON that names no tool on offer is an answer like any other.
"""

from __future__ import annotations

import ast
import json
import re
from typing import Final

from mlxd_worker.chat.parsing.pieces import Begin, Called, Piece, Said, Tools, call_of, make_call

PYTHON_TAG: Final = "<|python_tag|>"
_BEGINNINGS: Final = (PYTHON_TAG, '{"name":"', '{"type":"function"', '{"function":')
_LONGEST: Final = 256
"""So many characters, blanks among them, may come before the beginning is known."""
_BLANKS: Final = re.compile(r"\s+")
_BETWEEN: Final = re.compile(r"[\s;]*")
_METHOD: Final = re.compile(r"\s*([\w.]+)\.call(\(.*\))\s*", re.DOTALL)


class Llama3Parser:
    """One answer."""

    def __init__(self, tools: Tools, begin: Begin) -> None:
        self._tools = tools
        self._held = ""
        self._body: list[str] = []
        """What is held of an answer that is certain to begin like a call."""
        self._text = begin.middle or not tools.offered
        self._certain = False

    def push(self, text: str) -> list[Piece]:
        """Take the next text; return the pieces that are certain."""
        if self._certain:
            self._body.append(text)
            return []
        self._held += text
        if not self._text:
            self._judge()
        return self._flush() if self._text else []

    def finish(self) -> list[Piece]:
        """Return what was held back."""
        self._held = "".join((self._held, *self._body))
        self._body.clear()
        try:
            calls = [] if self._text else _decode(self._held, self._tools)
        except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
            calls = []
        if not calls:
            return self._flush()
        self._held = ""
        return [*calls]

    def _judge(self) -> None:
        beginning = _BLANKS.sub("", self._held[:_LONGEST])
        self._certain = any(beginning.startswith(form) for form in _BEGINNINGS)
        self._text = not any(
            beginning.startswith(form) or form.startswith(beginning) for form in _BEGINNINGS
        )
        if not self._certain and len(self._held) >= _LONGEST:
            self._text = True

    def _flush(self) -> list[Piece]:
        text, self._held = self._held, ""
        return [Said(text)] if text else []


def _decode(text: str, tools: Tools) -> list[Called]:
    """Return the calls of tools on offer that make up a text; none, or an error, for another."""
    body = text.strip().removeprefix(PYTHON_TAG)
    method = _METHOD.fullmatch(body)
    calls = _objects(body) if method is None else [_keywords(*method.groups())]
    return calls if all(call.name in tools.types for call in calls) else []


def _objects(body: str) -> list[Called]:
    decoder = json.JSONDecoder()
    calls: list[Called] = []
    place = 0
    while place < len(body):
        item, place = decoder.raw_decode(body, place)
        is_wrapped = isinstance(item, dict) and isinstance(item.get("function"), dict)
        calls.append(call_of(item["function"] if is_wrapped else item))
        between = _BETWEEN.match(body, place)
        place = between.end() if between else place
    return calls


def _keywords(name: str, arguments: str) -> Called:
    """Return the call of a built-in tool: NAME.call(KEY=VALUE, ...), the values literals."""
    tree = ast.parse(f"f{arguments}", mode="eval").body
    if not isinstance(tree, ast.Call) or tree.args:
        raise ValueError("not a call by keywords")
    words = [(word.arg, word.value) for word in tree.keywords if word.arg is not None]
    if len(words) < len(tree.keywords):  # **, which names nothing
        raise ValueError("keywords without a name")
    return make_call(name, {key: ast.literal_eval(value) for key, value in words})
