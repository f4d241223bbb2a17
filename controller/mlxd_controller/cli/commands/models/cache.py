"""`mlxd cache`: what is kept on disk of prompts: list, size, drop, verify; also without a server.

Invariants:
- A server that keeps prompts in the folder is asked, and does what is to be done; without one, or
  where it keeps none, or keeps them in another folder than the one that was named, the folder is
  looked at here, under the lock that a server would have.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from mlxd.client import Client
from mlxd.messages import DroppedPrefixes, PrefixFolder, PrefixStore, VerifiedPrefixes
from mlxd_controller.cli import options as o
from mlxd_controller.cli.completion import named_model
from mlxd_controller.cli.grouping import ask_server
from mlxd_controller.cli.outcome import ExitCode, complain, is_unreachable
from mlxd_controller.cli.security import Server
from mlxd_controller.cli.stores import PREFIX_DISK_FOLDER_DEFAULT, key_file, prefix_folder
from mlxd_controller.cli.terminal import show
from mlxd_shared.blocks.folder import FolderRefused
from mlxd_shared.blocks.root import FormFolder, RootFolder
from mlxd_shared.blocks.sealing import DiskKey
from mlxd_shared.domain.errors import InvalidRequest, ModelNotFound
from mlxd_shared.domain.units import format_bytes
from mlxd_shared.security.disk_key import read_disk_key
from mlxd_shared.wire.status import RemoteError

Folder: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER",
        envvar="MLXD_PREFIX_DISK_FOLDER",
        help="Where prompts are kept, if that is not the server's folder."
        f"  [default: {PREFIX_DISK_FOLDER_DEFAULT}]",
        show_default=False,
    ),
]
KeyFile: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        envvar="MLXD_PREFIX_DISK_KEY",
        help="The key of files that are encrypted, where no server is asked; without it they are"
        " left as they are, unchecked.",
        show_default=False,
    ),
]
NUMBERS = ("context", "blocks", "size")
cache = typer.Typer(
    name="cache",
    help="What is kept on disk of prompts: list it, drop it, check it. Works without a server too.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@cache.command("list")
@ask_server
async def list_(
    *, prefix_disk_folder: Folder = None, as_json: o.Json = False, where: Server
) -> None:
    """List what is kept on disk, by model."""
    store = await _read(where, prefix_disk_folder)
    if as_json:
        show.json_line(store)
        return
    rows = [
        [
            one.model or "-",
            show.short(one.model_digest) or "-",
            one.weights or "-",
            str(one.context_length or "-"),
            str(one.blocks),
            "yes" if one.encrypted else "no",
            format_bytes(one.nbytes),
            "in use" if one.in_use else _day(one.last_use_time),
        ]
        for one in store.folders
    ]
    about = ("model", "digest", "weights", "context", "blocks", "encrypted", "size", "last used")
    show.table(about, rows, right=NUMBERS)


@cache.command()
@ask_server
async def size(
    *, prefix_disk_folder: Folder = None, as_json: o.Json = False, where: Server
) -> None:
    """Say how much is kept on disk, and how much may be."""
    store = await _read(where, prefix_disk_folder)
    budget = f" of {format_bytes(store.budget_nbytes)}" if store.budget_nbytes else ""
    value = {"nbytes": store.nbytes, "budget_nbytes": store.budget_nbytes or None}
    show.answer(f"{format_bytes(store.nbytes)}{budget} in {store.path}", value, as_json=as_json)


@cache.command()
@ask_server
async def drop(
    model: Annotated[str | None, named_model("Only this model's.", metavar="[MODEL]")] = None,
    *,
    prefix_disk_folder: Folder = None,
    as_json: o.Json = False,
    where: Server,
) -> None:
    """Remove what is kept on disk of a model's prompts, or of all."""
    async with _serving(where, prefix_disk_folder) as client:
        if client is None:
            dropped = _drop_here(prefix_disk_folder, model)
        elif model is None:
            dropped = await client.prefixes.drop_all()
        else:
            dropped = await client.prefixes.drop(model)
    text = f"{dropped.blocks} files removed, {format_bytes(dropped.nbytes)}"
    show.answer(text, dropped, as_json=as_json)


@cache.command()
@ask_server
async def verify(
    *,
    prefix_disk_folder: Folder = None,
    prefix_disk_key: KeyFile = None,
    as_json: o.Json = False,
    where: Server,
) -> ExitCode:
    """Read every file, and remove those that are damaged. Fails if any was."""
    async with _serving(where, prefix_disk_folder) as client:
        if client is None:
            findings = _verify_here(prefix_disk_folder, prefix_disk_key)
        else:
            async with client.prefixes.verify() as checks:
                findings = [one async for one in checks]
    for one in findings:
        show.answer(_describe(one), one, as_json=as_json)
    return ExitCode.ERROR if any(one.removed or one.unread for one in findings) else ExitCode.OK


def _describe(one: VerifiedPrefixes) -> str:
    bad = [f"{one.removed} damaged and removed"] if one.removed else []
    bad += [f"{one.unread} unreadable"] if one.unread else []
    bad += [f"{one.locked} unchecked for want of their key"] if one.locked else []
    return f"{one.model or one.form}: {', '.join([f'{one.sound} sound', *bad])}"


@contextlib.asynccontextmanager
async def _serving(where: Server, folder: Path | None) -> AsyncIterator[Client | None]:
    """Yield a client of the server that keeps prompts on disk; None where there is none.

    folder: the one that was named: a server that has another one is not meant.
    """
    async with where.client() as client:
        try:
            status = await client.status()
        except RemoteError as error:
            if not is_unreachable(error):
                raise
            status = None
        store = None if status is None else status.prefix_store
        named = None if folder is None else str(prefix_folder(folder, os.environ))
        yield None if store is None or named not in (None, store.path) else client


async def _read(where: Server, folder: Path | None) -> PrefixStore:
    """Return what is kept, by a server's word or by the folder itself."""
    async with _serving(where, folder) as client:
        if client is not None:
            store = (await client.status()).prefix_store
            if store is not None:
                return store
    path = prefix_folder(folder, os.environ)
    with _own(path) as root:
        kept = [] if root is None else [root.survey(form) for form in root.forms()]
    folders = sorted(kept, key=lambda one: (one.about.model, one.form))
    shown = tuple(_to_folder(one) for one in folders)
    return PrefixStore(str(path), 0, sum(one.nbytes for one in shown), shown)


@contextlib.contextmanager
def _own(path: Path, key: DiskKey | None = None) -> Iterator[RootFolder | None]:
    """Own the folder around the body; None where there is none, which is not made."""
    if not path.is_dir():
        yield None
        return
    try:
        root = RootFolder(path, key)
    except FolderRefused as refused:
        raise InvalidRequest.of("--prefix-disk-folder", str(refused)) from refused
    with contextlib.closing(root):
        yield root


def _drop_here(folder: Path | None, model: str | None) -> DroppedPrefixes:
    with _own(prefix_folder(folder, os.environ)) as root:
        kept = [] if root is None else [root.survey(form) for form in root.forms()]
        chosen = [one for one in kept if model is None or _is_of(one, model)]
        if model is not None and not chosen:
            raise ModelNotFound(model, "nothing is kept of it")
        blocks = nbytes = 0
        for one in chosen:
            gone = None if root is None else root.trim(one.form, 0)
            if gone is None:
                complain(f"{one.about.model or one.form}: a worker has it")
                continue
            blocks += one.blocks
            nbytes += gone
    return DroppedPrefixes(blocks, nbytes)


def _verify_here(folder: Path | None, key: Path | None) -> list[VerifiedPrefixes]:
    own_key = None if key is None else read_disk_key(key_file(key))
    with _own(prefix_folder(folder, os.environ), own_key) as root:
        if root is None:
            return []
        checks = [root.verify(form) for form in root.forms()]
    return [
        VerifiedPrefixes(
            one.form,
            one.about.model,
            one.sound,
            sum(one.refused.values()),
            one.unread,
            one.locked,
        )
        for one in checks
    ]


def _is_of(one: FormFolder, model: str) -> bool:
    return model in (one.about.model, one.about.digest) or (
        len(model) >= show.DIGEST_CHARS and one.about.digest.startswith(model)
    )


def _to_folder(one: FormFolder) -> PrefixFolder:
    used = dt.datetime.fromtimestamp(one.last_s, dt.UTC) if one.last_s else None
    about = one.about
    return PrefixFolder(
        form=one.form,
        model=about.model,
        model_digest=about.digest,
        weights=about.weights,
        context_length=about.context_length,
        nbytes=one.nbytes,
        blocks=one.blocks,
        last_use_time=used,
        in_use=one.is_held,
        encrypted=one.is_encrypted,
    )


def _day(moment: dt.datetime | None) -> str:
    return "-" if moment is None else moment.astimezone().strftime("%Y-%m-%d %H:%M")
