"""`mlxd models`, `ps`, `unload`, `forget`: list models, and unload or rename them."""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from typing import Annotated

import typer

from mlxd.messages import Model, ModelState
from mlxd_controller.cli import options as o
from mlxd_controller.cli import show
from mlxd_controller.cli.grouping import ask_server
from mlxd_controller.cli.outcome import ExitCode, complain
from mlxd_controller.cli.security import Server
from mlxd_shared.config import UNLOAD_GRACE_DEFAULT_S
from mlxd_shared.domain.units import format_bytes

Grace = Annotated[
    float | None,
    typer.Option(
        parser=o.duration,
        metavar="DURATION",
        help=f"How long streams may continue.  [default: {UNLOAD_GRACE_DEFAULT_S:.0f}s]",
    ),
]
Force = Annotated[bool, typer.Option("--force", help="End streams in progress at once.")]


@ask_server
async def models(*, as_json: o.Json = False, where: Server) -> ExitCode:
    """List the models that the server knows."""
    async with where.client() as client:
        models_known = await client.models()
    if as_json:
        show.json_line(models_known)
        return ExitCode.OK
    show.table(
        ("name", "digest", "architecture", "stored", "context", "state", "store", "path"),
        [
            (
                ", ".join((model.name, *model.aliases)),
                show.short(model.digest),
                model.architecture,
                format_bytes(model.stored_nbytes),
                str(model.context_length_max),
                show.state(model),
                model.store,
                model.path,
            )
            for model in models_known
        ],
        right=("stored", "context"),
    )
    _explain_failures(models_known)
    return ExitCode.OK


@ask_server
async def ps(*, as_json: o.Json = False, where: Server) -> ExitCode:
    """List the models that are loaded, loading or unloading."""
    async with where.client() as client:
        known = await client.models()
    loaded = [model for model in known if model.state is not ModelState.UNLOADED]
    if as_json:
        show.json_line(loaded)
        return ExitCode.OK
    now = dt.datetime.now(dt.UTC)
    show.table(
        ("name", "digest", "size", "device", "context", "streams", "priority", "until", "state"),
        [
            (
                model.name,
                show.short(model.digest),
                format_bytes(model.resident_nbytes) if model.resident_nbytes else "-",
                model.device or "-",
                str(model.context_length or "-"),
                str(model.streams_active),
                str(model.priority),
                show.until(model, now),
                show.state(model),
            )
            for model in loaded
        ],
        right=("size", "context", "streams", "priority"),
    )
    _explain_failures(loaded)
    return ExitCode.OK


def _explain_failures(models: Sequence[Model]) -> None:
    for model in models:
        if model.state is ModelState.FAILED:
            complain(f"{model.name}: {model.error}")


@ask_server
async def unload(
    model: Annotated[str, typer.Argument(help="A name, alias or digest.")],
    *,
    grace: Grace = None,
    force: Force = False,
    as_json: o.Json = False,
    where: Server,
) -> ExitCode:
    """Unload a model; succeeds if it is not loaded."""
    async with where.client() as client:
        unloaded = await client.unload(model, grace_s=grace, force=force)
    if as_json:
        show.json_line(unloaded)
        return ExitCode.OK
    ended = unloaded.streams_aborted
    streams = f"; {ended} stream{'s' if ended != 1 else ''} ended" if ended else ""
    typer.echo(f"{unloaded.model.name} is {show.state(unloaded.model)}{streams}")
    return ExitCode.OK


@ask_server
async def forget(
    name: Annotated[str, typer.Argument(help="A name that `mlxd load FOLDER` created.")],
    *,
    as_json: o.Json = False,
    where: Server,
) -> ExitCode:
    """Remove a name that loading a folder created. The files stay."""
    async with where.client() as client:
        left = await client.forget(name)
    if as_json:
        show.json_line({"name": name, "names": left})
        return ExitCode.OK
    typer.echo(f"{name} is forgotten" + (f"; also known as {', '.join(left)}" if left else ""))
    return ExitCode.OK
