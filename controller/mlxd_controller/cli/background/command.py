"""`mlxd service`: a server that the system starts, watches and ends, for this user."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from mlxd_controller.cli import options as o
from mlxd_controller.cli.background.units import Service, Step, launchd, systemd
from mlxd_controller.cli.configuration.reading import PATH_VARIABLE, find_path
from mlxd_controller.cli.configuration.values import LEFT_OUT
from mlxd_controller.cli.outcome import ExitCode, complain, leave, usage_error
from mlxd_controller.cli.terminal import show
from mlxd_shared.config import SERVICE_COMMAND_S

service = typer.Typer(
    name="service",
    no_args_is_help=True,
    help="Have the system run the server for you: systemd on Linux, launchd on macOS.",
)
Options = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[-- OPTIONS...]",
        help="Options of `mlxd serve`; better in the configuration file, which is read as well.",
        show_default=False,
    ),
]
Print = Annotated[
    bool, typer.Option("--print", help="Only print the file that describes the service.")
]


@service.command()
def install(options: Options = None, *, only_print: Print = False) -> None:
    """Describe the service to the system, and start it; also in place of one that is there."""
    _check_options(options or [])
    described = describe_service(options or [])
    if only_print:
        typer.echo(described.text, nl=False)
        return
    put_in_place(described)
    typer.echo(f"installed {described.path}")
    if described.hint:
        complain(described.hint)


@service.command()
def uninstall() -> None:
    """Stop the service, and forget it; succeeds if there is none."""
    described = describe_service([])
    if take_away(described):
        typer.echo(f"removed {described.path}")
    else:
        typer.echo("no service is installed")


@service.command()
def status(*, as_json: o.Json = False) -> None:
    """Show whether the service is installed, and runs. Exit code 0: it runs."""
    described = describe_service([])
    installed = described.path.is_file()
    running = installed and is_running(described)
    if as_json:
        path = str(described.path)
        show.json_line({"path": path, "installed": installed, "running": running})
    else:
        state = "running" if running else "not running" if installed else "not installed"
        show.fields([("service", str(described.path)), ("state", state)])
    raise typer.Exit(ExitCode.OK if running else ExitCode.ERROR)


def describe_service(options: list[str]) -> Service:
    """Return the service of this installation and this user, with options of `mlxd serve`.

    Raises:
        typer.Exit: there can be none on this system, or with these options.
    """
    command = [sys.executable, "-m", "mlxd_controller.cli", "serve", *options]
    named = os.environ.get(PATH_VARIABLE)
    path = find_path(os.environ)  # by the same variable, but absolute
    kept = {PATH_VARIABLE: LEFT_OUT if path is None else str(path)} if named else {}
    if sys.platform not in {"linux", "darwin"}:
        leave(f"{sys.platform} has neither systemd nor launchd", ExitCode.ERROR)
    try:
        described = (
            launchd(command, home=Path.home(), user_id=os.getuid(), kept=kept)
            if sys.platform == "darwin"
            else systemd(command, home=Path.home(), environment=os.environ, kept=kept)
        )
    except (RuntimeError, ValueError) as error:
        usage_error(str(error))
    return described


def put_in_place(described: Service) -> None:
    """Write the file, and have the service run by it.

    Raises:
        typer.Exit: the file cannot be written, or one of the system's commands fails.
    """
    try:
        described.path.parent.mkdir(parents=True, exist_ok=True)
        described.path.write_text(described.text, encoding="utf-8")
    except OSError as error:
        leave(f"{described.path}: cannot be written: {error.strerror}", ExitCode.ERROR)
    for step in described.start:
        _perform(step)


def take_away(described: Service) -> bool:
    """Stop the service and remove its file; return False where there is none.

    Raises:
        typer.Exit: one of the system's commands fails.
    """
    if not described.path.is_file():
        return False
    for step in described.stop:
        _perform(step)
    described.path.unlink()
    for step in described.forget:
        _perform(step)
    return True


def is_running(described: Service) -> bool:
    """Return whether the system says that the service runs."""
    return described.is_up in _run(described.state).stdout.split()


def _check_options(options: list[str]) -> None:
    """Refuse what `mlxd serve` would, and what a service cannot do."""
    from mlxd_controller.cli.app import CommandModules  # noqa: PLC0415 - it imports this one

    if CommandModules()["serve"].make_context("serve", list(options)).params["detach"]:
        usage_error("--detach: the system keeps a service in the background itself")


def _perform(step: Step) -> None:
    done = _run(step.command)
    if done.returncode and not step.may_fail:
        said = (done.stderr or done.stdout).strip() or f"exit code {done.returncode}"
        leave(f"{' '.join(step.command)}: {said}", ExitCode.ERROR)


def _run(command: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command, capture_output=True, text=True, timeout=SERVICE_COMMAND_S, check=False,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except FileNotFoundError:
        leave(f"there is no {command[0]} here; --print shows what it would be told", ExitCode.ERROR)
    except subprocess.TimeoutExpired:
        leave(f"{' '.join(command)}: no answer in {SERVICE_COMMAND_S:.0f} s", ExitCode.ERROR)
