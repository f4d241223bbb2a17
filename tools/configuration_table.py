"""Writes the tables of docs/configuration.md: every key of the configuration file, from the code.

python tools/configuration_table.py            # write them
python tools/configuration_table.py --check    # exit 1 where they are not what is written there
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

import typer
from typer.core import TyperGroup

from mlxd_controller.cli.app import app
from mlxd_controller.cli.configuration.keys import KEYS, MODEL_KEYS, Key

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "configuration.md"
BEGIN = "<!-- made by tools/configuration_table.py -->\n"
END = "<!-- end of what is made -->\n"
ASIDE = re.compile(r"\s*\[(?:env var|default): [^\]]*\]")
PATH_HELP = "The model's folder, which the server offers under this name, as `--model` does."


def helps_of(command: object) -> Mapping[str, str]:
    """Return what the options of a command are for, by parameter and by flag."""
    texts: dict[str, str] = {}
    for parameter in getattr(command, "params", ()):
        text = ASIDE.sub("", getattr(parameter, "help", None) or "").strip()
        texts |= dict.fromkeys((str(parameter.name), *parameter.opts), text)
    return texts


def help_of(key: Key, group: TyperGroup) -> str:
    """Return what a key is for: the help of its option."""
    command, _, parameter = (key.help_of or key.options[0]).rpartition(".")
    return helps_of(group.commands[command] if command else group)[parameter]


def takes(key: Key) -> str:
    """Return what values a key has."""
    return ", ".join(f"`{each}`" for each in key.choices) or key.kind.value


def rows(cells: Iterable[tuple[str, ...]]) -> list[str]:
    """Return lines of a table."""
    return [f"| {' | '.join(text.replace('|', chr(92) + '|') for text in row)} |" for row in cells]


def tables() -> str:
    """Return both tables."""
    group = typer.main.get_command(app)
    assert isinstance(group, TyperGroup)
    load = helps_of(group.commands["load"])
    keys = (
        (f"`{key.name}`", f"`{key.variable}`", takes(key), key.default, help_of(key, group))
        for key in KEYS
    )
    models = (
        (f"`{name}`", takes(key), load.get(f"--{name.replace('_', '-')}", PATH_HELP))
        for name, key in MODEL_KEYS.items()
    )
    lines = [
        "| key | variable | takes | default | what for |",
        "|---|---|---|---|---|",
        *rows(keys),
        "",
        '### `[models."NAME"]`',
        "",
        "| key | takes | what for |",
        "|---|---|---|",
        *rows(models),
    ]
    return "\n".join(lines) + "\n"


def with_tables(text: str) -> str:
    """Return a document with the tables between its marks."""
    head, _, rest = text.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return f"{head}{BEGIN}\n{tables()}\n{END}{tail}"


def main() -> int:
    """Write or check; return the exit code."""
    text = DOCUMENT.read_text(encoding="utf-8")
    made = with_tables(text)
    if "--check" in sys.argv:
        return int(made != text)
    DOCUMENT.write_text(made, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
