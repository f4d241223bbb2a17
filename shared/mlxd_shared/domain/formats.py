"""What an output must look like, as the domain sees it: one of a few kinds of grammar, as text."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class FormatKind(enum.Enum):
    """The language that a format is written in; the value is its field on the wire."""

    JSON_SCHEMA = "json_schema"
    JSON_OBJECT = "json_object"
    REGEX = "regex"
    EBNF_GRAMMAR = "ebnf_grammar"
    CHOICE = "choice"


@dataclass(frozen=True, slots=True)
class ResponseFormat:
    """A format that complete output must match; checked for size alone, not yet for sense.

    `text` is the schema, expression or grammar; `choices` are the texts of a CHOICE.
    """

    kind: FormatKind
    text: str = ""
    choices: tuple[str, ...] = ()
