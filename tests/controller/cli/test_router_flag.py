"""`--router` on the command line: its defaults, what it needs, and what needs it."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer

from mlxd_controller.cli.http import complete_flag
from mlxd_controller.cli.router import Router
from mlxd_controller.settings import RouterDoor
from mlxd_shared import config


def test_an_address_may_be_left_out() -> None:
    """The default stands in, as it does for --http on the same line."""
    assert complete_flag(["--router", "--http"]) == [
        "--router", config.DEFAULT_ROUTER_ADDRESS, "--http", config.DEFAULT_HTTP_ADDRESS,
    ]  # fmt: skip
    assert complete_flag(["--router", "h:1"]) == ["--router", "h:1"]


def test_without_it_there_is_no_door() -> None:
    """Nothing is opened that nobody asked for."""
    assert Router().door() is None


def test_a_door_is_as_it_was_named() -> None:
    """A file has a path that does not depend on where the server is started."""
    door = Router("h:1", ["a"], ["10.0.0.0/8"], Path("m.json")).door()
    assert door == RouterDoor("h:1", ("a",), ("10.0.0.0/8",), Path("m.json").absolute())


ALONE = [
    Router(router_model=["a"]),
    Router(router_network=["10.0.0.0/8"]),
    Router(router_manifest=Path("m.json")),
]


@pytest.mark.parametrize("options", ALONE)
def test_the_other_options_need_it(options: Router, capsys: pytest.CaptureFixture[str]) -> None:
    """They would be passed over in silence."""
    with pytest.raises(typer.Exit):
        options.door()
    assert "needs --router" in capsys.readouterr().err
