"""What the documents tell a reader to type is there to be typed: targets, commands, options."""

from __future__ import annotations

import re

import pytest
import typer
from typer.core import TyperGroup

from mlxd_controller.cli.app import app
from tests.tidy.tree import ROOT

DOCUMENTS = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")


def text_of(document: str) -> str:
    """Read a file of the tree."""
    return (ROOT / document).read_text(encoding="utf-8")


def make_targets() -> set[str]:
    """The targets that the Makefile lists in its help."""
    return set(re.findall(r"^([a-z-]+):.*##", text_of("Makefile"), flags=re.MULTILINE))


def commands() -> dict[str, set[str]]:
    """The commands of `mlxd`, and the options of each."""
    group = typer.main.get_command(app)
    assert isinstance(group, TyperGroup)
    return {
        name: {option for param in command.params for option in param.opts} | {"--help"}
        for name, command in group.commands.items()
    }


@pytest.mark.parametrize("document", [*DOCUMENTS, ".ci/run"])
def test_every_make_target_named_exists(document: str) -> None:
    """A reader never types a `make` target that is not there."""
    text = text_of(document)
    quoted = re.findall(r'(?:`|" |\$ )make ([a-z-]+)', text)
    in_block = re.findall(r"^ *make ([a-z-]+)(?: *#.*| +[A-Z]+=.*)?$", text, flags=re.MULTILINE)
    named = {*quoted, *in_block}

    assert named <= make_targets(), sorted(named - make_targets())


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_command_named_exists(document: str) -> None:
    """A reader never types an `mlxd` command that is not there."""
    named = set(re.findall(r"(?:`|\$ )mlxd ([a-z]+)", text_of(document)))

    assert named <= commands().keys(), sorted(named - commands().keys())


def test_every_option_shown_exists() -> None:
    """An option in an example is one that its command takes."""
    shown = re.findall(r"(?:`|\$ )mlxd ([a-z]+)([^`\n]*)", text_of("README.md"))
    for name, rest in shown:
        named = set(re.findall(r"(?<![\w-])--[a-z-]+", rest.partition("#")[0]))
        assert named <= commands()[name], f"mlxd {name}: {sorted(named - commands()[name])}"


def test_every_command_is_in_the_readme() -> None:
    """The README names every command, so that a reader finds it."""
    named = set(re.findall(r"\bmlxd ([a-z]+)|`([a-z]+)`", text_of("README.md")))
    flat = {name for pair in named for name in pair if name}

    assert commands().keys() <= flat, sorted(commands().keys() - flat)
