"""Lets the real command lines parse what a file tells them, without running anything."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import typer
from typer.core import TyperGroup

from mlxd_controller.cli.app import app
from mlxd_worker.process.options import parse_options


def parse_command(command: Sequence[str]) -> dict[str, Any]:
    """Parse `command`, which is mlxd's or a worker's, and answer its options by name.

    Raises whatever that command line raises for an option that it does not take.
    """
    words = list(command)
    if words[:3] == ["python", "-m", "mlxd_worker"]:
        words[:3] = ["mlxd-worker"]
    if words[0] == "mlxd-worker":
        options = parse_options(words[1:])
        return {
            "listen": options.listen,
            "allow_remote": options.allow_remote,
            "machine": options.machine,
            "open_health": options.security.open_health,
        }
    assert words[0] == "mlxd", words
    group = typer.main.get_command(app)
    assert isinstance(group, TyperGroup)
    return group.commands[words[1]].make_context(words[1], words[2:]).params


def port_of(address: str) -> str:
    """The port of HOST:PORT."""
    return address.rpartition(":")[2]
