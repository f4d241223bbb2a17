"""Models' files on a node: found there by digest, else taken from its controller, part by part.

A node's places are tried in this order: the path that the controller names, where all machines
mount one file system; copies made before; and the node's own stores. Only files whose digest is the
model's are taken.

Invariants:
- A copy appears under its digest in one step, once all its bytes are on the disk, each file's
  SHA-256 is its source's, and its digest is the model's; until then its parts lie beside it, and a
  copy that was cut off goes on at the byte where it ended. The digest covers small files whole and
  a sample of each tensor (mlxd_models.files.digest).
- What this machine's disk refuses is told as an error of the copy, never raised as the system's.
- Of the disk as much stays free as pulls leave (`pulling.room`).
- A file is written in order, at most FLEET_CHUNK_BYTES at a time, within the size announced for it.
"""

from __future__ import annotations

import asyncio
import errno
import os
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from mlxd_controller.fleet.facts import NO_STORES, FileFact
from mlxd_controller.fleet.offers import hash_file
from mlxd_controller.pulling.room import FreeOf, check_reserve, check_room, free_nbytes
from mlxd_controller.runtime.ports import ModelRef
from mlxd_controller.settings import StorePlaces
from mlxd_controller.store.model_library import Library
from mlxd_controller.store.shelves import DEMO_NAME, demo_model, library_of
from mlxd_models.files.digest import model_digest
from mlxd_models.files.model_files import machine_short
from mlxd_models.fit.facts import Parts
from mlxd_shared import config
from mlxd_shared.domain.errors import (
    InvalidModel,
    InvalidRequest,
    MlxdError,
    PullFailed,
    StoreFull,
)

PART = ".part"
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_DIGEST = re.compile(r"[0-9a-f]{64}")
_NAME = re.compile(r"(?:(?:1_Pooling|additional_chat_templates)/)?[^/\x00]{1,255}")


_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class _Copying:
    """A copy that was begun: its files, and the numbers of those whose sum was compared."""

    files: tuple[FileFact, ...]
    proved: set[int] = field(default_factory=set)


class NodeFiles:
    """The models that one node can read, and the copies that are made there.

    Where the disk refuses, all methods raise StoreFull, MachineShort or PullFailed.
    """

    def __init__(
        self,
        folder: Path | None = None,
        stores: StorePlaces = NO_STORES,
        *,
        free_of: FreeOf = free_nbytes,
    ) -> None:
        """Keep copies in `folder`; None: in the user's caches. `stores` are looked into."""
        self.stores = stores
        self._free_of = free_of
        self._folder = folder
        self._library: tuple[StorePlaces, Library] | None = None
        self._copies: dict[str, _Copying] = {}

    async def find(self, digest: str, path: str) -> str | None:
        """Return the path of a model here; None where it is nowhere."""
        for candidate in (Path(path), self._copy(digest)):
            if await asyncio.to_thread(is_there, candidate, digest):
                return str(candidate)
        library = self._open_library()
        await library.list_models()
        ref = library.find_known(digest)
        return None if ref is None else str(ref.path)

    async def list_models(self) -> tuple[ModelRef, ...]:
        """Return what this machine's own stores have, but for the model that comes with mlxd.

        Raises:
            MachineShort: they cannot be listed now.
        """
        refs = await self._open_library().list_models()
        return tuple(
            ref
            for ref in refs
            if isinstance(ref, ModelRef) and DEMO_NAME not in (ref.name, *ref.aliases)
        )

    async def describe_ranks(self, digest: str) -> Parts:
        """Return what ranks have of a model of this machine's own stores.

        Raises:
            InvalidModel: its files are not here any more, or cannot be read.
        """
        ref = self._open_library().find_known(digest)
        if ref is None:
            raise InvalidModel("the model is not in this machine's stores any more")
        division = ref.facts.division
        await division.describe()
        if division.problem:
            raise InvalidModel(division.problem)
        return division.parts

    def _open_library(self) -> Library:
        if self._library is None or self._library[0] != self.stores:
            self._library = self.stores, library_of(((DEMO_NAME, demo_model()),), self.stores)
        return self._library[1]

    async def begin(self, digest: str, files: Sequence[FileFact]) -> tuple[int, ...]:
        """Begin or continue a copy; return how many bytes of each file are here.

        Raises:
            InvalidRequest: a name that leads elsewhere, or too many files.
            StoreFull: the disk has no room for the rest beside the reserve of pulls.
        """
        self._copies[digest] = _Copying(tuple(files))
        return await _on_disk(lambda: _begin(self._part(digest), files, self._free_of))

    async def write(self, digest: str, number: int, offset: int, chunk: bytes) -> None:
        """Append a part to a file of a copy.

        Raises:
            InvalidRequest: it does not follow what is here, or passes the file's size; or no copy
                was begun that has such a file.
            StoreFull: it would take of the reserve of pulls; what has arrived stays.
        """
        fact = self._fact_of(digest, number)
        if len(chunk) > config.FLEET_CHUNK_BYTES:
            raise InvalidRequest.of("chunk", f"over {config.FLEET_CHUNK_BYTES} bytes")
        part = self._part(digest)
        await _on_disk(lambda: _append(part, fact, offset, chunk, self._free_of))

    async def check(self, digest: str, number: int, sha256: str) -> None:
        """Compare a file of a copy that is all here with its source.

        Raises:
            InvalidModel: its sum is another one: the file is removed, all others stay.
            InvalidRequest: no copy was begun that has such a file.
        """
        copying, fact = self._copying(digest), self._fact_of(digest, number)
        path = self._part(digest) / fact.name
        here = await _on_disk(lambda: hash_file(path))
        if here != sha256:
            await _on_disk(path.unlink)
            raise InvalidModel(f"the copy's SHA-256 is {here}, not {sha256}", fact.name)
        copying.proved.add(number)

    async def finish(self, digest: str) -> str:
        """Prove a copy and put it into its place; return its path.

        Raises:
            InvalidModel: it is not whole, or a file's sum was not compared; or its digest is
                another one: it is removed then.
            InvalidRequest: it was not begun.
        """
        copying, part, whole = self._copying(digest), self._part(digest), self._copy(digest)
        del self._copies[digest]
        await _on_disk(lambda: _finish(part, whole, digest, copying))
        return str(whole)

    def _copying(self, digest: str) -> _Copying:
        copying = self._copies.get(digest)
        if copying is None:
            raise InvalidRequest.of("digest", "no copy of it was begun on this node")
        return copying

    def _fact_of(self, digest: str, number: int) -> FileFact:
        files = self._copying(digest).files
        if not 0 <= number < len(files):
            raise InvalidRequest.of("number", f"{number} is none of {len(files)} files")
        return files[number]

    def _copy(self, digest: str) -> Path:
        if not _DIGEST.fullmatch(digest):
            raise InvalidRequest.of("digest", "is not 64 hexadecimal digits")
        folder = self._folder
        if folder is None:
            caches = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
            folder = Path(caches).expanduser() / "mlxd" / "copies"
        return folder / digest

    def _part(self, digest: str) -> Path:
        return self._copy(digest).with_suffix(PART)


async def _on_disk(work: Callable[[], _T]) -> _T:
    """Do `work` on a thread; what the system refuses becomes an error of ours."""
    try:
        return await asyncio.to_thread(work)
    except OSError as error:
        raise _refusal(error) from error


def _refusal(error: OSError) -> MlxdError:
    place = error.filename or "the copy"
    if error.errno in _FULL:
        return StoreFull(f"{place}: the node's disk is full; what has arrived stays")
    return machine_short(error, str(place)) or PullFailed(f"{place}: {error.strerror or error}")


def is_there(path: Path, digest: str) -> bool:
    """Return whether a path leads to the model of this digest. Blocks on the disk."""
    try:
        return path.exists() and model_digest(path) == digest
    except (InvalidModel, OSError):
        return False


def _begin(part: Path, files: Sequence[FileFact], free_of: FreeOf) -> tuple[int, ...]:
    if len(files) > config.FLEET_FILES_MAX:
        raise InvalidRequest.of("files", f"over {config.FLEET_FILES_MAX}")
    for fact in files:
        if not _NAME.fullmatch(fact.name) or fact.name in {".", ".."}:
            raise InvalidRequest.of("files", f"{fact.name!r} is no name of a model's file")
    part.mkdir(mode=0o700, parents=True, exist_ok=True)
    here = tuple(_size(part / fact.name, fact) for fact in files)
    rest = sum(fact.nbytes for fact in files) - sum(here)
    check_room(_disk_of(part), free_of(part), rest)
    for fact in files:
        path = part / fact.name
        path.parent.mkdir(mode=0o700, exist_ok=True)
        path.touch()
    return here


def _size(path: Path, fact: FileFact) -> int:
    """Return how much of a file is there; a longer one is another file's, and removed."""
    if not path.exists():
        return 0
    nbytes = path.stat().st_size
    if nbytes > fact.nbytes:
        path.unlink()
        return 0
    return nbytes


def _disk_of(part: Path) -> str:
    return f"the node's disk of {part.parent}"


def _append(part: Path, fact: FileFact, offset: int, chunk: bytes, free_of: FreeOf) -> None:
    path = part / fact.name
    here = path.stat().st_size
    if here != offset or offset + len(chunk) > fact.nbytes:
        limit = f"{fact.name}: {here} of {fact.nbytes} bytes are there"
        raise InvalidRequest.of("offset", f"{offset} + {len(chunk)}, but {limit}")
    check_reserve(_disk_of(part), free_of(part) - len(chunk))
    with path.open("ab") as file:
        file.write(chunk)


def _finish(part: Path, whole: Path, digest: str, copying: _Copying) -> None:
    files = copying.files
    for number, fact in enumerate(files):
        if (part / fact.name).stat().st_size != fact.nbytes:
            raise InvalidModel("the copy is not whole", fact.name)
        if number not in copying.proved:
            raise InvalidModel("the copy's SHA-256 was not compared with its source's", fact.name)
    try:
        copied = model_digest(part)
    except InvalidModel:
        shutil.rmtree(part)
        raise
    if copied != digest:
        shutil.rmtree(part)
        raise InvalidModel(f"the copy's digest is {copied}, not {digest}")
    folders = {(part / fact.name).parent for fact in files}
    for path in (*(part / fact.name for fact in files), *folders):
        _sync(path)
    if whole.exists():  # damaged: it was not found by its digest
        shutil.rmtree(whole)
    part.replace(whole)
    _sync(whole.parent)


def _sync(path: Path) -> None:
    """Have a file, or a folder's names, on the disk: a machine that loses power keeps them."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
