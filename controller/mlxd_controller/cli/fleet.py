"""Workers on several machines, on the command line of `mlxd serve`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from mlxd_controller.cli.outcome import usage_error
from mlxd_controller.settings import FLEET_SCHEME, FleetPlace
from mlxd_shared.domain.errors import InvalidRequest
from mlxd_shared.ops.extras import check_extra
from mlxd_shared.security.net import parse_address

PANEL = "Several machines"
FLAG = "--fleet"
AUTO = "auto"
UNIX = "unix:"


@dataclass(frozen=True, slots=True)
class Fleet:
    """The cluster whose nodes run the workers, and how these are reached."""

    fleet: Annotated[
        str | None,
        typer.Option(
            FLAG,
            metavar="ray://HOST:PORT|auto",
            help="Run workers on the nodes of this Ray cluster that offer the resource mlxd; auto:"
            " the cluster that this machine belongs to. Needs the extra fleet.",
            show_default=False,
            rich_help_panel=PANEL,
        ),
    ] = None
    fleet_tls: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Reach workers over TLS with a token: a folder that has node.pem, node.key and"
            " token on each node, and ca.pem and token here, at one path. Needed unless all nodes"
            " are on loopback.",
            show_default=False,
            rich_help_panel=PANEL,
        ),
    ] = None

    def place(self) -> FleetPlace | None:
        """Return what was given; None: workers run on this machine.

        Raises:
            typer.Exit: the extra is missing, or the address is none.
        """
        if self.fleet is None:
            if self.fleet_tls is not None:
                usage_error(f"--fleet-tls needs {FLAG}")
            return None
        head = self.fleet.removeprefix(FLEET_SCHEME)
        try:
            check_extra("fleet", "fleet", "ray")
            if self.fleet != AUTO:
                parse_address(head)
        except InvalidRequest as error:
            usage_error(f"{FLAG} {self.fleet}: {error.describe()}")
        if self.fleet != AUTO and (head == self.fleet or head.startswith(UNIX)):
            usage_error(f"{FLAG} {self.fleet}: write {FLEET_SCHEME}HOST:PORT, or {AUTO}")
        tls = self.fleet_tls
        return FleetPlace(self.fleet, None if tls is None else tls.expanduser().absolute())
