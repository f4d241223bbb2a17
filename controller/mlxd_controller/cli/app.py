"""The typer application: which commands there are. Each lives in the module named after it."""

from __future__ import annotations

from importlib.metadata import version as installed_version
from typing import Annotated

import typer

from mlxd_controller.cli import options as o
from mlxd_controller.cli.commands.alias import alias
from mlxd_controller.cli.commands.embed import embed
from mlxd_controller.cli.commands.gateway import gateway
from mlxd_controller.cli.commands.generate import generate, tokenize
from mlxd_controller.cli.commands.health import health
from mlxd_controller.cli.commands.keys import keys
from mlxd_controller.cli.commands.load import fit, load
from mlxd_controller.cli.commands.models import forget, models, ps, unload
from mlxd_controller.cli.commands.protos import protos
from mlxd_controller.cli.commands.pull import pull
from mlxd_controller.cli.commands.run import run
from mlxd_controller.cli.commands.serve import serve
from mlxd_controller.cli.commands.status import status
from mlxd_controller.cli.grouping import spread_groups
from mlxd_controller.cli.http import ServeCommand
from mlxd_controller.cli.output import Commands
from mlxd_controller.cli.security import Credentials
from mlxd_shared import config

EPILOG = (
    "Exit codes: 0 done, 1 failed, 2 bad usage or refused request, 3 no such model, 4 no server,"
    " 5 does not fit, 130 interrupted, 141 nobody reads the output."
)
app = typer.Typer(
    name="mlxd",
    cls=Commands,
    no_args_is_help=True,
    epilog=EPILOG,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version() -> str:
    return f"mlxd {installed_version('mlxd')}"


def _print_version(wanted: bool) -> None:  # noqa: FBT001 - typer calls it with the flag
    if wanted:
        typer.echo(_version())
        raise typer.Exit


@app.callback()
@spread_groups
def mlxd(
    *,
    address: o.GlobalAddress = config.DEFAULT_ADDRESS,
    credentials: Credentials,
    show_version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Serve many MLX language models from one machine's memory."""


def version() -> None:
    """Print the version."""
    typer.echo(_version())


app.command(cls=ServeCommand)(serve)
for command in (
    gateway, pull, alias, load, unload, forget, ps, models, run, generate, embed, tokenize, status,
    health, fit, protos, version,
):  # fmt: skip
    app.command()(command)
app.add_typer(keys)
