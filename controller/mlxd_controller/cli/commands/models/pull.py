"""`mlxd pull`: a model from a hub into its cache, where `mlxd serve` finds it."""

from __future__ import annotations

import os
import re
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mlxd_controller.cli import options as o
from mlxd_controller.cli.outcome import ExitCode, exit_code_of, leave, say, usage_error
from mlxd_controller.cli.security import Server
from mlxd_controller.cli.stores import hub_cache_of
from mlxd_controller.cli.terminal.progress import ByteBar
from mlxd_shared.domain.errors import MlxdError, ModelNotFound
from mlxd_shared.domain.units import format_bytes
from mlxd_shared.ops.terminal import escape_line
from mlxd_shared.security.net import parse_address

if TYPE_CHECKING:
    from mlxd_controller.pulling.hub import Pulled

MAIN = "main"
_PART = r"[A-Za-z0-9](?:[\w.-]*\w)?"
_REPOSITORY = re.compile(rf"{_PART}(?:/{_PART})?", re.ASCII)
_REVISION = re.compile(r"\w(?:[\w./-]*\w)?", re.ASCII)

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
    typer.Option(metavar="FOLDER", help="The cache to fill.  [default: as `mlxd serve`]"),
]


def pull(
    model: Model,
    *,
    include: Include = None,
    hub_cache: HubCache = None,
    as_json: o.Json = False,
) -> None:
    """Download a model from the hub (HF_ENDPOINT). An interrupted pull resumes where it stopped."""
    pulled = _pull_now(model, include, hub_cache)
    if as_json:
        from mlxd_controller.pulling.hub import to_json_line  # noqa: PLC0415 - as below

        typer.echo(to_json_line(pulled))
        return
    typer.echo(_describe(model, pulled))


def _pull_now(model: str, include: list[str] | None, hub_cache: Path | None) -> Pulled:
    """Pull a model, with a bar on stderr.

    Raises:
        typer.Exit: it failed, or was interrupted.
    """
    # Imported here: other commands need nothing of it.
    from mlxd_controller.pulling.hub import Wanted  # noqa: PLC0415
    from mlxd_controller.pulling.hub import pull as pull_now  # noqa: PLC0415
    from mlxd_controller.pulling.hub_api import Hub, PullFailed, Reason  # noqa: PLC0415

    repository, revision = _parse_reference(model)
    cache = hub_cache or hub_cache_of(os.environ)
    if cache is None:
        usage_error("no cache to pull into: set one with --hub-cache")
    wanted = Wanted(repository, revision, cache.expanduser().absolute(), tuple(include or ()))
    try:
        hub = Hub(endpoint=os.environ.get("HF_ENDPOINT") or None)
        with ByteBar(model) as bar:
            return pull_now(hub, wanted, partial(bar.update, model))
    except PullFailed as error:
        codes = {Reason.NOT_FOUND: ExitCode.NOT_FOUND, Reason.NO_ANSWER: ExitCode.UNREACHABLE}
        leave(str(error), codes.get(error.reason, ExitCode.ERROR))
    except MlxdError as error:
        leave(f"{model}: {error.describe()}", exit_code_of(error))
    except KeyboardInterrupt:
        leave("interrupted; the next pull resumes here", ExitCode.INTERRUPTED)


def _describe(model: str, pulled: Pulled) -> str:
    size = format_bytes(pulled.nbytes)
    return f"{model} is {pulled.commit[:12]}: {pulled.files} files, {size}, in {pulled.path}"


def _parse_reference(text: str) -> tuple[str, str]:
    repository, at, revision = text.partition("@")
    revision = revision if at else MAIN
    bad = "--" in repository or ".." in text or "//" in revision
    if bad or not _REPOSITORY.fullmatch(repository) or not _REVISION.fullmatch(revision):
        usage_error(f"{text!r} is not ORG/NAME or ORG/NAME@REVISION")
    return repository, revision


def offer_pull(error: ModelNotFound, where: Server) -> bool:
    """Ask on a terminal whether to pull a model that is not there; return whether it is there now.

    Elsewhere nobody is asked, and the error says `mlxd pull`; nor of a server that runs elsewhere,
    whose cache is another one, or of what no hub has.

    Raises:
        typer.Exit: the pull failed, or was interrupted.
    """
    is_here = parse_address(where.address).loopback
    may_be_there = _is_on_a_hub(error.model) and sys.stdin.isatty() and sys.stderr.isatty()
    if not (is_here and may_be_there):
        return False
    hub = os.environ.get("HF_ENDPOINT") or "Hugging Face"
    question = escape_line(f"{error.model} is not here. Pull it from {hub}?")
    if not typer.confirm(question, default=True, err=True):
        return False
    say(_describe(error.model, _pull_now(error.model, None, None)))
    return True


def _is_on_a_hub(name: str) -> bool:
    organisation, slash, _ = name.partition("/")
    return (
        bool(organisation and slash) and _REPOSITORY.fullmatch(name.partition("@")[0]) is not None
    )
