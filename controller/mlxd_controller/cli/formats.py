"""What output must look like, as the command line says it: one of five options, or none."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mlxd_controller.cli.outcome import usage_error
from mlxd_shared.config import FORMAT_CHARS_MAX
from mlxd_shared.domain.formats import FormatKind, ResponseFormat

PANEL = "What the output looks like (one of these)"

JsonObject = Annotated[
    bool, typer.Option("--json-object", help="A JSON object.", rich_help_panel=PANEL)
]
JsonSchema = Annotated[
    str | None,
    typer.Option(
        metavar="FILE|TEXT", help="JSON of this schema; a file, or the schema itself.",
        rich_help_panel=PANEL,
    ),
]  # fmt: skip
Regex = Annotated[
    str | None,
    typer.Option(
        metavar="TEXT",
        help="A text that matches this expression as a whole.",
        rich_help_panel=PANEL,
    ),
]
Grammar = Annotated[
    str | None,
    typer.Option(
        metavar="FILE|TEXT", help="A text of this GBNF grammar; a file, or the grammar itself.",
        rich_help_panel=PANEL,
    ),
]  # fmt: skip
Choice = Annotated[
    list[str] | None,
    typer.Option(metavar="TEXT", help="One of these texts; repeatable.", rich_help_panel=PANEL),
]


def response_format(
    *,
    json_object: bool,
    json_schema: str | None,
    regex: str | None,
    grammar: str | None,
    choice: list[str] | None,
) -> ResponseFormat | None:
    """Return the requested format; exits with a message if several are given."""
    asked: list[ResponseFormat] = []
    if json_object:
        asked.append(ResponseFormat(FormatKind.JSON_OBJECT))
    if json_schema is not None:
        asked.append(ResponseFormat(FormatKind.JSON_SCHEMA, _text_of(json_schema, begin="{")))
    if regex is not None:
        asked.append(ResponseFormat(FormatKind.REGEX, regex))
    if grammar is not None:
        asked.append(ResponseFormat(FormatKind.EBNF_GRAMMAR, _text_of(grammar, contains="::=")))
    if choice:
        asked.append(ResponseFormat(FormatKind.CHOICE, choices=tuple(choice)))
    if len(asked) > 1:
        usage_error("give one of --json-object, --json-schema, --regex, --grammar and --choice")
    return asked[0] if asked else None


def _text_of(given: str, *, begin: str = "", contains: str = "") -> str:
    """Return a text that is given as it is, known by what it begins with or contains, or a file's.

    A schema may also be `true` or `false`; a file of that name is ./true.
    """
    if begin and given.lstrip().startswith(begin):
        return given
    if contains and contains in given:
        return given
    if begin and given.strip() in ("true", "false"):
        return given
    try:
        with Path(given).open(encoding="utf-8") as file:
            text = file.read(FORMAT_CHARS_MAX + 1)
    except (OSError, ValueError) as error:
        usage_error(f"{given}: {error}")
    if len(text) > FORMAT_CHARS_MAX:
        usage_error(f"{given}: more than {FORMAT_CHARS_MAX} characters")
    return text
