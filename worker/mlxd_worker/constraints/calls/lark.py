r"""Grammars in the library's notation, made of parts: marks, texts up to a mark, JSON.

Invariants:
- A control token is named by its id, and none of them is a part of any text: in the vocabulary that
  these grammars are compiled for they have no bytes.
- A text up to a mark ends with the first one. Blanks are bounded, as in JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

from mlxd_worker.constraints.patterns import literal_pattern

BLANKS: Final = r"[\x20\x09]{1,4}|\x0D?\x0A[\x20\x09]{0,32}"
"""What may be between two parts of JSON: blanks on a line, or a line's end and an indentation.
Without bounds some models write nothing else."""
ESCAPES: Final = 'nrbtf"\\'
r"""What may be behind a backslash: with `\u` a listed member could be spelled as another one."""


def json_schema(schema: Mapping[str, Any]) -> str:
    """Return the rule of the JSON texts that a schema, as `read_schema` returns it, allows."""
    options = {"whitespace_pattern": BLANKS, "json_allowed_escapes": ESCAPES}
    return f"%json {json.dumps({**schema, 'x-guidance': options}, ensure_ascii=False)}"


def any_of(ways: Iterable[str]) -> str:
    """Return the choice between rules."""
    return f"({' | '.join(ways)})"


class Rules:
    """The rules of one grammar; each method returns what refers to what it has written."""

    def __init__(self, tokens: Mapping[str, int]) -> None:
        """Begin without rules. tokens: the ids of the spellings that are control tokens."""
        self._tokens = tokens
        spellings = sorted(tokens, key=len, reverse=True)
        self._spelled = re.compile("|".join(map(re.escape, spellings)) or "(?!)")
        self._lines: list[str] = []
        self._known: dict[str, str] = {}
        self._terminals: dict[str, str] = {}

    def write(self, start: str) -> str:
        """Return the grammar that begins with `start`."""
        return "\n".join([f"start: {start}", *self._lines, ""])

    def rule(self, body: str, *, options: str = "") -> str:
        """Return the name of a rule; equal ones are written once."""
        key = f"{options}: {body}"
        if key not in self._known:
            self._known[key] = f"r{len(self._known)}"
            self._lines.append(f"{self._known[key]}{key}")
        return self._known[key]

    @property
    def blanks(self) -> str:
        """Blanks, or none."""
        return f"{self.rule(f'/{BLANKS}/')}?"

    def text(self, text: str) -> str:
        """Return a fixed text, whose control tokens are themselves."""
        parts, place = [], 0
        for match in self._spelled.finditer(text):
            parts += [_quote(text[place : match.start()]), f"<[{self._tokens[match[0]]}]>"]
            place = match.end()
        parts.append(_quote(text[place:]))
        return " ".join(filter(None, parts))

    def up_to(self, mark: str, *, without: str = "") -> str:
        """Return any text and the first `mark` behind it; without another text before that.

        `without` is a control token, or it is looked for where `mark` has none.
        """
        met = self._spelled.search(mark)
        if met is None:
            body = f"/{_until(mark)}/"
            if without and not self._spelled.search(without):
                body = self._terminal(f"{body} & ~/{_until(without)}(?s:.*)/")
            return self.rule(body, options="[lazy]")
        before, rest = mark[: met.start()], self.text(mark[met.start() :])
        if not before:
            return f"{self.rule('/(?s:.+)/')}? {rest}"
        piece = self.rule(f"/{_until(before)}/", options="[lazy]")
        return f"{piece}+ {rest}"

    def _terminal(self, body: str) -> str:
        if body not in self._terminals:
            self._terminals[body] = f"T{len(self._terminals)}"
            self._lines.append(f"{self._terminals[body]}: {body}")
        return self._terminals[body]

    def json(self, schema: Mapping[str, Any]) -> str:
        """Return JSON that a schema, as `read_schema` returns it, allows."""
        return self.rule(json_schema(schema))


def _until(mark: str) -> str:
    return f"(?s:.*)(?:{literal_pattern((mark,))})"


def _quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""
