"""What the documents tell a reader to type is there to be typed: targets, commands, options."""

from __future__ import annotations

import re

import pytest
import typer
from typer.core import TyperGroup

from mlxd_controller.cli.app import app
from tests.tidy.tree import ROOT

MANUAL = (
    "README.md",
    *(
        f"docs/{name}.md"
        for name in ("commands", "configuration", "operations", "requests", "resume")
    ),
)
DOCUMENTS = (*MANUAL, "CONTRIBUTING.md", "CHANGELOG.md")
README_LINES_MAX = 120


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
    return {name: options_of(command) | {"--help"} for name, command in group.commands.items()}


def options_of(command: object) -> set[str]:
    """The options of a command, and of those below it."""
    own = {option for param in getattr(command, "params", ()) for option in param.opts}
    below = getattr(command, "commands", {}).values()
    return own.union(*(options_of(each) for each in below))


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


@pytest.mark.parametrize("document", MANUAL)
def test_every_option_shown_exists(document: str) -> None:
    """An option in an example is one that its command takes."""
    shown = re.findall(r"(?:`|\$ )mlxd ([a-z]+)([^`\n]*)", text_of(document))
    for name, rest in shown:
        named = set(re.findall(r"(?<![\w-])--[a-z-]+", rest.partition("#")[0]))
        assert named <= commands()[name], f"mlxd {name}: {sorted(named - commands()[name])}"


def test_every_command_is_in_the_manual() -> None:
    """The table of commands has them all, and no other."""
    named = set(re.findall(r"^\| `mlxd ([a-z]+)", text_of("docs/commands.md"), flags=re.MULTILINE))

    assert commands().keys() == named


def test_the_readme_is_short() -> None:
    """A newcomer reads it to its end; the manual has the rest."""
    assert len(text_of("README.md").splitlines()) <= README_LINES_MAX


@pytest.mark.parametrize(
    "document",
    ["README.md", *(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))],
)
def test_every_link_leads_somewhere(document: str) -> None:
    """A link within the tree names a file or a folder of it."""
    folder = (ROOT / document).parent
    for target in re.findall(r"\]\(([^)\s]+)\)", text_of(document)):
        if "://" in target or target.startswith("mailto:"):
            continue
        path, _, _ = target.partition("#")
        assert (folder / path).exists(), f"{document}: {target}"


def test_every_decision_is_in_the_index() -> None:
    """One row a record, in their order."""
    folder = ROOT / "docs" / "decisions"
    listed = re.findall(
        r"^\| \[\d+\]\(([^)]+)\)", text_of("docs/decisions/README.md"), re.MULTILINE
    )
    there = sorted(path.name for path in folder.glob("[0-9]*.md") if path.name[:4] != "0000")

    assert listed == there
