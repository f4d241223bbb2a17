"""The door for a router in front, on the command line of `mlxd serve`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from mlxd_controller.cli.outcome import usage_error
from mlxd_controller.settings import RouterDoor
from mlxd_shared import config
from mlxd_shared.domain.errors import InvalidRequest
from mlxd_shared.ops.extras import check_extra

PANEL = "A router in front"
FLAG = "--router"


@dataclass(frozen=True, slots=True)
class Router:
    """Where a router finds this machine's models, and which machines are trusted to ask."""

    router: Annotated[
        str | None,
        typer.Option(
            FLAG,
            metavar="[HOST:PORT]",
            help="Serve models to a router such as SMG, as engines of vllm.grpc.engine: each at a"
            " port of its own, from this one on; without an address from"
            f" {config.DEFAULT_ROUTER_ADDRESS} on. Routers send neither TLS nor a token. Needs the"
            " extra router.",
            show_default=False,
            rich_help_panel=PANEL,
        ),
    ] = None
    router_model: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Offer this model to the router, at the next port; repeatable.  [default: all]",
            rich_help_panel=PANEL,
        ),
    ] = None
    router_network: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NETWORK",
            help="Let the machines of this network, such as 10.0.0.0/24, call at --router besides"
            " this one; repeatable.  [default: none]",
            rich_help_panel=PANEL,
        ),
    ] = None
    router_manifest: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Keep a file that names the ports, as SMG's --discovery-file reads it.",
            rich_help_panel=PANEL,
        ),
    ] = None

    def door(self) -> RouterDoor | None:
        """Return what was given; None: no door.

        Raises:
            typer.Exit: the extra is missing, or --router, which the other options need.
        """
        rest = {
            "--router-model": self.router_model,
            "--router-network": self.router_network,
            "--router-manifest": self.router_manifest,
        }
        if self.router is None:
            for flag, value in rest.items():
                if value:
                    usage_error(f"{flag} needs {FLAG}")
            return None
        try:
            check_extra("router", "router", "smg_grpc_proto")
        except InvalidRequest as error:
            usage_error(error.describe())
        manifest = self.router_manifest
        return RouterDoor(
            self.router,
            tuple(self.router_model or ()),
            tuple(self.router_network or ()),
            None if manifest is None else manifest.expanduser().absolute(),
        )
