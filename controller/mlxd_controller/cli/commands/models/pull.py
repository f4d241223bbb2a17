"""`mlxd pull`: a model from a hub into its cache, where `mlxd serve` finds it."""

from __future__ import annotations

import os
import re
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from mlxd_controller.cli import options as o
from mlxd_controller.cli.outcome import ExitCode, exit_code_of, leave, usage_error
from mlxd_controller.cli.stores import hub_cache_of
from mlxd_controller.cli.terminal.progress import ByteBar
from mlxd_shared.domain.errors import MlxdError
from mlxd_shared.domain.units import format_bytes

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
    # Imported here: other commands need nothing of it.
    from mlxd_controller.pulling.hub import Wanted, to_json_line  # noqa: PLC0415
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
            pulled = pull_now(hub, wanted, partial(bar.update, model))
    except PullFailed as error:
        codes = {Reason.NOT_FOUND: ExitCode.NOT_FOUND, Reason.NO_ANSWER: ExitCode.UNREACHABLE}
        leave(str(error), codes.get(error.reason, ExitCode.ERROR))
    except MlxdError as error:
        leave(f"{model}: {error.describe()}", exit_code_of(error))
    except KeyboardInterrupt:
        leave("interrupted; the next pull resumes here", ExitCode.INTERRUPTED)
    if as_json:
        typer.echo(to_json_line(pulled))
        return
    size = format_bytes(pulled.nbytes)
    typer.echo(f"{model} is {pulled.commit[:12]}: {pulled.files} files, {size}, in {pulled.path}")


def _parse_reference(text: str) -> tuple[str, str]:
    repository, at, revision = text.partition("@")
    revision = revision if at else MAIN
    bad = "--" in repository or ".." in text or "//" in revision
    if bad or not _REPOSITORY.fullmatch(repository) or not _REVISION.fullmatch(revision):
        usage_error(f"{text!r} is not ORG/NAME or ORG/NAME@REVISION")
    return repository, revision
