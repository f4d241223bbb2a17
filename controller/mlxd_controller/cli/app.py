"""The typer application: which commands there are. Each lives in the module that is named here.

A command's module is imported when somebody names the command: to import them all takes longer than
most commands do.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Annotated, Any

import typer

import mlxd as library
from mlxd_controller.cli import options as o
from mlxd_controller.cli.configuration.keys import variables_of
from mlxd_controller.cli.configuration.reading import load_configuration
from mlxd_controller.cli.grouping import spread_groups
from mlxd_controller.cli.http import LaunchCommand, ServeCommand
from mlxd_controller.cli.outcome import usage_error
from mlxd_controller.cli.output import Commands
from mlxd_controller.cli.security import Credentials
from mlxd_shared import config

EPILOG = (
    "Exit codes: 0 done, 1 failed, 2 bad usage or refused request, 3 no such model, 4 no server,"
    " 5 does not fit, 130 interrupted, 141 nobody reads the output. Other names: list and ls for"
    " models, stop for unload, rm for forget."
)
MODULES = {
    "serve": "mlxd_controller.cli.commands.serving.serve",
    "service": "mlxd_controller.cli.background.command",
    "gateway": "mlxd_controller.cli.commands.serving.gateway",
    "launch": "mlxd_controller.cli.commands.launch",
    "keys": "mlxd_controller.cli.commands.serving.keys",
    "pull": "mlxd_controller.cli.commands.models.pull",
    "alias": "mlxd_controller.cli.commands.models.alias",
    "load": "mlxd_controller.cli.commands.models.load",
    "unload": "mlxd_controller.cli.commands.models.inventory",
    "forget": "mlxd_controller.cli.commands.models.inventory",
    "ps": "mlxd_controller.cli.commands.models.inventory",
    "models": "mlxd_controller.cli.commands.models.inventory",
    "cache": "mlxd_controller.cli.commands.models.cache",
    "show": "mlxd_controller.cli.commands.models.details",
    "run": "mlxd_controller.cli.commands.prompts.run",
    "generate": "mlxd_controller.cli.commands.prompts.generate",
    "embed": "mlxd_controller.cli.commands.prompts.embed",
    "score": "mlxd_controller.cli.commands.prompts.score",
    "tokenize": "mlxd_controller.cli.commands.prompts.generate",
    "status": "mlxd_controller.cli.commands.watching.status",
    "fleet": "mlxd_controller.cli.commands.watching.fleet",
    "top": "mlxd_controller.cli.top.command",
    "logs": "mlxd_controller.cli.commands.watching.logs",
    "health": "mlxd_controller.cli.commands.watching.health",
    "fit": "mlxd_controller.cli.commands.models.load",
    "config": "mlxd_controller.cli.configuration.command",
    "doctor": "mlxd_controller.doctor.command",
    "bench": "mlxd_controller.bench.command",
    "protos": "mlxd_controller.cli.commands.protos",
    "version": "mlxd_controller.cli.app",
}
"""Where the function of each command's name is, in the order of the help."""
OTHER_NAMES = {"list": "models", "ls": "models", "stop": "unload", "rm": "forget"}
"""What people type who come from another tool; the help names them once."""
CLASSES = {"serve": ServeCommand, "launch": LaunchCommand}
"""Of commands that read their arguments in a way of their own."""
UNCONFIGURED = frozenset({"config", "doctor", "version"})
"""Commands that run whatever is wrong with the configuration file."""


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
    command = typer.main.get_command(alone)
    _give_variables(command, name)
    return command


def _give_variables(command: Any, name: str) -> None:  # noqa: ANN401 - as above
    """Have a command's parameters read the variables of their keys; "": those before a command."""
    variables = variables_of(name)
    for parameter in command.params:
        parameter.envvar = variables.get(parameter.name, parameter.envvar)


class Group(Commands):
    """`mlxd`: a group of `CommandModules`."""

    def __init__(self, **options: Any) -> None:  # noqa: ANN401 - typer's own
        super().__init__(**options | {"commands": CommandModules()})
        _give_variables(self, "")

    def make_context(self, *arguments: Any, **options: Any) -> Any:  # noqa: ANN401 - click's own
        """Read the command line, with the configuration file in place of defaults."""
        configuration = load_configuration(os.environ)
        configuration.fill_environment(os.environ)
        own = {"default_map": configuration.defaults(), "obj": configuration}
        return super().make_context(*arguments, **options | own)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:  # noqa: ANN401 - click's own
        """Look the command up; one that would use a file that is refused does not run."""
        if ctx.obj.problem and args[0] not in UNCONFIGURED and not ctx.resilient_parsing:
            usage_error(ctx.obj.problem)
        return super().resolve_command(ctx, [OTHER_NAMES.get(args[0], args[0]), *args[1:]])

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
