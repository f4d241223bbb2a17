"""What output must look like, as the command line says it: one of five options, or none."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from mlxd_controller.cli.outcome import usage_error
from mlxd_shared.config import FORMAT_CHARS_MAX
from mlxd_shared.domain.formats import FormatKind, ResponseFormat

PANEL = "What the output looks like (one of these)"


def _form(help_text: str, *names: str, metavar: str | None = None) -> Any:  # noqa: ANN401
    return typer.Option(*names, metavar=metavar, help=help_text, rich_help_panel=PANEL)


@dataclass(frozen=True, slots=True)
class Format:
    """The options, of which one at most is given."""

    json_object: Annotated[bool, _form("A JSON object.", "--json-object")] = False
    json_schema: Annotated[
        str | None,
        _form("JSON of this schema; a file, or the schema itself.", metavar="FILE|TEXT"),
    ] = None
    regex: Annotated[
        str | None, _form("A text that matches this expression as a whole.", metavar="TEXT")
    ] = None
    grammar: Annotated[
        str | None,
        _form("A text of this GBNF grammar; a file, or the grammar itself.", metavar="FILE|TEXT"),
    ] = None
    choice: Annotated[
        list[str] | None, _form("One of these texts; repeatable.", metavar="TEXT")
    ] = None

    def choose(self) -> ResponseFormat | None:
        """Return the requested format; exits with a message if several are given."""
        formats: list[ResponseFormat] = []
        if self.json_object:
            formats.append(ResponseFormat(FormatKind.JSON_OBJECT))
        if self.json_schema is not None:
            schema = _text_of(self.json_schema, begin="{")
            formats.append(ResponseFormat(FormatKind.JSON_SCHEMA, schema))
        if self.regex is not None:
            formats.append(ResponseFormat(FormatKind.REGEX, self.regex))
        if self.grammar is not None:
            grammar = _text_of(self.grammar, contains="::=")
            formats.append(ResponseFormat(FormatKind.EBNF_GRAMMAR, grammar))
        if self.choice:
            formats.append(ResponseFormat(FormatKind.CHOICE, choices=tuple(self.choice)))
        if len(formats) > 1:
            usage_error("give one of --json-object, --json-schema, --regex, --grammar and --choice")
        return formats[0] if formats else None


def _text_of(value: str, *, begin: str = "", contains: str = "") -> str:
    """Return a text that is given as it is, known by what it begins with or contains, or a file's.

    A schema may also be `true` or `false`; a file of that name is ./true.
    """
    if begin and value.lstrip().startswith(begin):
        return value
    if contains and contains in value:
        return value
    if begin and value.strip() in ("true", "false"):
        return value
    try:
        with Path(value).open(encoding="utf-8") as file:
            text = file.read(FORMAT_CHARS_MAX + 1)
    except OSError as error:
        usage_error(f"{value}: {error.strerror}")
    except ValueError as error:
        usage_error(f"{value}: {error}")
    if len(text) > FORMAT_CHARS_MAX:
        usage_error(f"{value}: more than {FORMAT_CHARS_MAX} characters")
    return text
