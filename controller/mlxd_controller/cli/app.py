"""The typer application: which commands there are. Each lives in the module that is named here.

A command's module is imported when somebody names the command: to import them all takes longer than
most commands do.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Annotated, Any

import typer

import mlxd as library
from mlxd_controller.cli import options as o
from mlxd_controller.cli.grouping import spread_groups
from mlxd_controller.cli.http import ServeCommand
from mlxd_controller.cli.output import Commands
from mlxd_controller.cli.security import Credentials
from mlxd_shared import config

EPILOG = (
    "Exit codes: 0 done, 1 failed, 2 bad usage or refused request, 3 no such model, 4 no server,"
    " 5 does not fit, 130 interrupted, 141 nobody reads the output."
)
MODULES = {
    "serve": "mlxd_controller.cli.commands.serve",
    "gateway": "mlxd_controller.cli.commands.gateway",
    "keys": "mlxd_controller.cli.commands.keys",
    "pull": "mlxd_controller.cli.commands.pull",
    "alias": "mlxd_controller.cli.commands.alias",
    "load": "mlxd_controller.cli.commands.load",
    "unload": "mlxd_controller.cli.commands.models",
    "forget": "mlxd_controller.cli.commands.models",
    "ps": "mlxd_controller.cli.commands.models",
    "models": "mlxd_controller.cli.commands.models",
    "run": "mlxd_controller.cli.commands.run",
    "generate": "mlxd_controller.cli.commands.generate",
    "embed": "mlxd_controller.cli.commands.embed",
    "tokenize": "mlxd_controller.cli.commands.generate",
    "status": "mlxd_controller.cli.commands.status",
    "health": "mlxd_controller.cli.commands.health",
    "fit": "mlxd_controller.cli.commands.load",
    "doctor": "mlxd_controller.doctor.command",
    "bench": "mlxd_controller.bench.command",
    "protos": "mlxd_controller.cli.commands.protos",
    "version": "mlxd_controller.cli.app",
}
"""Where the function of each command's name is, in the order of the help."""
CLASSES = {"serve": ServeCommand}
"""Of commands that read their arguments in a way of their own."""


class CommandModules(Mapping[str, Any]):
    """The commands by name, each made when it is first looked up; names alone import nothing."""

    def __init__(self) -> None:
        self._made: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:  # noqa: ANN401 - click's, see `output.Commands`
        if name not in self._made:
            self._made[name] = _make_command(name, vars(import_module(MODULES[name]))[name])
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(MODULES)

    def __len__(self) -> int:
        return len(MODULES)


def _make_command(name: str, function: Any) -> Any:  # noqa: ANN401 - as above
    if isinstance(function, typer.Typer):  # a group of its own
        return typer.main.get_command(function)
    alone = typer.Typer(add_completion=False, rich_markup_mode=None)
    alone.command(name, cls=CLASSES.get(name))(function)
    return typer.main.get_command(alone)


class Group(Commands):
    """`mlxd`: a group of `CommandModules`."""

    def __init__(self, **options: Any) -> None:  # noqa: ANN401 - typer's own
        super().__init__(**options | {"commands": CommandModules()})

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ANN401, ARG002 - click's own
        """Return the names in the order of the help."""
        return list(self.commands)


app = typer.Typer(
    name="mlxd",
    cls=Group,
    no_args_is_help=True,
    epilog=EPILOG,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version() -> str:
    return f"mlxd {library.__version__}"


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
