"""Groups of options as typer sees them, and as a command gets them."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Annotated

import typer

from mlxd_controller.cli.grouping import spread_groups


@dataclass(frozen=True, slots=True)
class Size:
    """Two options."""

    rows: Annotated[int, typer.Option(help="How many.")] = 1
    wide: bool = False


def test_a_group_is_shown_as_its_fields_and_arrives_as_one_value() -> None:
    """Names, defaults and what typer needs are those of the fields; the rest stays as it is."""
    arrived: list[tuple[str, Size]] = []

    @spread_groups
    def command(name: str = "x", *, size: Size) -> None:
        """Do it."""
        arrived.append((name, size))

    shown = inspect.signature(command).parameters
    command(name="a", rows=3, wide=True)

    assert list(shown) == ["name", "rows", "wide"]
    assert (shown["rows"].default, shown["wide"].annotation) == (1, bool)
    assert (command.__name__, command.__doc__) == ("command", "Do it.")
    assert arrived == [("a", Size(3, wide=True))]
