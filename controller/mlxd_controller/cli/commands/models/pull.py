"""`mlxd pull`: a model from a hub into the cache of the server that serves it, or else into ours.

Who reaches a server has it download: into its cache, with its token, on its disk. Without a server
on this machine the command downloads by itself, and so it does where --hub-cache names a cache.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from mlxd import Client
from mlxd_controller.cli import options as o
from mlxd_controller.cli.grouping import Session, ask_server
from mlxd_controller.cli.outcome import ExitCode, leave, nobody_listens, report, say, usage_error
from mlxd_controller.cli.security import Server
from mlxd_controller.cli.stores import hub_cache_of
from mlxd_controller.cli.terminal.progress import ByteBar
from mlxd_controller.pulling.wanted import is_on_a_hub, wanted_of
from mlxd_shared.domain.errors import InvalidRequest, MlxdError, ModelNotFound
from mlxd_shared.domain.pulls import PulledModel
from mlxd_shared.domain.units import format_bytes
from mlxd_shared.ops.terminal import escape_line
from mlxd_shared.security.net import parse_address

_INTERRUPTED = "interrupted; the next pull resumes here"

Model = Annotated[
    str, typer.Argument(metavar="ORG/NAME[@REVISION]", help="The model's name on the hub.")
]
Include = Annotated[
    list[str] | None,
    typer.Option(
        metavar="PATTERN",
        help="Also download these files, such as '*.md'; repeatable. Pickles are never downloaded.",
    ),
]
HubCache = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER",
        help="Fill this cache, without a server.  [default: the server's, or as `mlxd serve`]",
    ),
]


@ask_server
def pull(
    model: Model,
    *,
    include: Include = None,
    hub_cache: HubCache = None,
    as_json: o.Json = False,
    where: Server,
) -> Session:
    """Download a model from the hub: the server does, or this command if there is none here.

    An interrupted pull resumes where it stopped. The hub is HF_ENDPOINT's.
    """
    patterns = tuple(include or ())
    try:
        wanted_of(model, patterns, Path())
    except InvalidRequest as error:
        usage_error("; ".join(violation.description for violation in error.violations))
    return partial(_pull, model, patterns, hub_cache, where, as_json=as_json)


def _pull(
    model: str, include: Sequence[str], hub_cache: Path | None, where: Server, *, as_json: bool
) -> NoReturn:
    pulled = None if hub_cache is not None else _pull_there(model, include, where)
    if pulled is None:
        pulled = _pull_here(model, include, hub_cache, where)
    typer.echo(json.dumps(asdict(pulled)) if as_json else describe_pulled(pulled))
    raise typer.Exit(ExitCode.OK)


def _pull_there(model: str, include: Sequence[str], where: Server) -> PulledModel | None:
    """Have the server pull; None: there is none, at an address of this machine.

    Raises:
        typer.Exit: it failed, or was interrupted.
    """

    async def ask() -> PulledModel:
        async with where.client() as client:
            return await have_pulled(client, model, include)

    try:
        with asyncio.Runner() as runner:
            return runner.run(ask())
    except KeyboardInterrupt:
        leave(_INTERRUPTED, ExitCode.INTERRUPTED)
    except MlxdError as error:
        if nobody_listens(error) and parse_address(where.address).loopback:
            return None
        raise typer.Exit(report(error, where.address, where.flags)) from error


async def have_pulled(client: Client, model: str, include: Sequence[str] = ()) -> PulledModel:
    """Have the server pull a model, with a bar on stderr, and return what it has pulled."""
    pulled: PulledModel | None = None
    with ByteBar(model) as bar:
        async with client.pull(model, include=include) as steps:
            async for step in steps:
                bar.show_pull(model, step)
                pulled = step.pulled
    assert pulled is not None  # the client has seen to that
    return pulled


def _pull_here(
    model: str, include: Sequence[str], hub_cache: Path | None, where: Server
) -> PulledModel:
    """Pull into a cache of this machine.

    Raises:
        typer.Exit: it failed, or was interrupted.
    """
    # Imported here: other commands need nothing of it.
    from mlxd_controller.pulling.hub import pull as pull_now  # noqa: PLC0415
    from mlxd_controller.pulling.hub_api import Hub  # noqa: PLC0415

    cache = hub_cache or hub_cache_of(os.environ)
    if cache is None:
        usage_error("no cache to pull into: set one with --hub-cache")
    wanted = wanted_of(model, include, cache.expanduser().absolute())
    try:
        hub = Hub(endpoint=os.environ.get("HF_ENDPOINT") or None)
        with ByteBar(model) as bar:
            return pull_now(hub, wanted, partial(bar.show_pull, model))
    except MlxdError as error:
        raise typer.Exit(report(error, where.address, where.flags)) from error
    except KeyboardInterrupt:
        leave(_INTERRUPTED, ExitCode.INTERRUPTED)


def describe_pulled(pulled: PulledModel) -> str:
    """Return what was pulled, for people."""
    size = format_bytes(pulled.nbytes)
    what = f"{pulled.commit[:12]}: {pulled.files} files, {size}"
    return escape_line(f"{pulled.name} is {what}, in {pulled.path}")  # another machine's words


def wants_pull(error: ModelNotFound) -> bool:
    """Ask on a terminal whether the server should pull a model that it has not.

    Elsewhere nobody is asked, and the error says `mlxd pull`; nor of what no hub has.
    """
    if not (is_on_a_hub(error.model) and sys.stdin.isatty() and sys.stderr.isatty()):
        return False
    question = escape_line(f"{error.model} is not here. Have the server pull it from its hub?")
    return typer.confirm(question, default=True, err=True)


async def pull_wanted(client: Client, error: ModelNotFound) -> None:
    """Have the server pull the model that it has not, and say what came."""
    say(describe_pulled(await have_pulled(client, error.model)))
