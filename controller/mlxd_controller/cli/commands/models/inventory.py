"""`mlxd models`, `ps`, `unload`, `forget`: list models, and unload or rename them."""

from __future__ import annotations

import asyncio
import datetime as dt
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, TypeAlias

import typer

from mlxd.messages import Model
from mlxd_controller.cli import options as o
from mlxd_controller.cli.completion import named_model
from mlxd_controller.cli.grouping import ask_server
from mlxd_controller.cli.outcome import complain, usage_error
from mlxd_controller.cli.security import Server
from mlxd_controller.cli.terminal import show
from mlxd_shared import config
from mlxd_shared.domain.figures import ModelState
from mlxd_shared.domain.units import FOREVER_S, format_bytes

Columns: TypeAlias = Mapping[str, Callable[[Model], str]]
"""What a list says of a model, by the columns' names."""
NUMBERS = ("stored", "size", "context", "streams", "priority", "prompts")
SPARE = (
    "path",
    "prompts",
    "priority",
    "digest",
    "architecture",
    "device",
    "context",
    "store",
    "streams",
)
"""What a terminal has no room for goes in this order; --json has all of it."""
Grace = Annotated[
    float | None,
    o.duration_option(
        f"How long streams may continue.  [default: {config.UNLOAD_GRACE_DEFAULT_S:.0f}s]"
    ),
]
Force = Annotated[bool, typer.Option("--force", help="End streams in progress at once.")]


@ask_server
async def models(*, output: o.Output = None, as_json: o.Json = False, where: Server) -> None:
    """List the models that the server knows."""
    columns: Columns = {
        "name": lambda model: ", ".join((model.name, *model.aliases)),
        "digest": lambda model: show.short(model.digest),
        "architecture": lambda model: model.architecture,
        "stored": lambda model: format_bytes(model.stored_nbytes),
        "context": lambda model: str(model.context_length_max),
        "state": show.state,
        "store": lambda model: model.store,
        "path": show.place,
    }
    async with where.client() as client:
        _list(await client.models(), columns, output="json" if as_json else output)


@ask_server
async def ps(
    *,
    output: o.Output = None,
    watch: o.Watch = False,
    interval: o.Interval = config.WATCH_INTERVAL_DEFAULT_S,
    as_json: o.Json = False,
    where: Server,
) -> None:
    """List the models that are loaded, loading or unloading."""
    if not config.WATCH_INTERVAL_MIN_S <= interval < FOREVER_S:
        usage_error(f"--interval: at least {config.WATCH_INTERVAL_MIN_S}s, and not for ever")
    form = "json" if as_json else output
    async with where.client() as client:
        while True:
            known = await client.models()
            if watch and form != "json":
                show.clear_screen()
            _list_loaded(known, form)
            if not watch:
                return
            await asyncio.sleep(interval)


def _list_loaded(known: Sequence[Model], output: str | None) -> None:
    now = dt.datetime.now(dt.UTC)
    columns: Columns = {
        "name": lambda model: model.name,
        "digest": lambda model: show.short(model.digest),
        "size": lambda m: format_bytes(m.resident_nbytes) if m.resident_nbytes else "-",
        "device": lambda model: model.device or "-",
        "context": lambda model: str(model.context_length or "-"),
        "streams": lambda model: str(model.streams_active),
        "priority": lambda model: str(model.priority),
        "prompts": lambda m: f"{m.prefix_reload_s:.1f} s" if m.prefix_reload_s else "-",
        "until": lambda model: show.until(model, now),
        "state": show.state,
    }
    loaded = [model for model in known if model.state is not ModelState.UNLOADED]
    _list(loaded, columns, output=output)


def _list(models: Sequence[Model], columns: Columns, *, output: str | None) -> None:
    if output == "json":
        show.json_line(models)
        return
    rows = [[text_of(model) for text_of in columns.values()] for model in models]
    spare = [column for column in SPARE if column in columns]
    show.table(tuple(columns), rows, right=NUMBERS, spare=spare, wide=output == "wide")
    for model in models:
        if model.state is ModelState.FAILED:
            complain(f"{model.name}: {model.error}")


@ask_server
async def unload(
    model: Annotated[str, named_model("A name, alias or digest.")],
    *,
    grace: Grace = None,
    force: Force = False,
    as_json: o.Json = False,
    where: Server,
) -> None:
    """Unload a model; succeeds if it is not loaded."""
    async with where.client() as client:
        unloaded = await client.unload(model, grace_s=grace, force=force)
    ended = unloaded.streams_aborted
    streams = f"; {ended} stream{'s' if ended != 1 else ''} ended" if ended else ""
    text = f"{unloaded.model.name} is {show.state(unloaded.model)}{streams}"
    show.answer(text, unloaded, as_json=as_json)


@ask_server
async def forget(
    name: Annotated[str, named_model("A name that `mlxd load FOLDER` created.")],
    *,
    as_json: o.Json = False,
    where: Server,
) -> None:
    """Remove a name that loading a folder created. The files stay."""
    async with where.client() as client:
        left = await client.forget(name)
    text = f"{name} is forgotten" + (f"; also known as {', '.join(left)}" if left else "")
    show.answer(text, {"name": name, "names": left}, as_json=as_json)
