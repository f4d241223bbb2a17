"""A model's files on this machine's disk, as another machine takes them: listed, read, summed.

Invariants:
- Whatever a load reads is listed, also where a link leads to it, and nothing else.
- A file is read where its name led when it was listed. One that changes meanwhile has another sum,
  or another digest of the model: whoever copies compares both.
- A machine has at most FLEET_OFFERS_MAX offers, the latest ones.
"""

from __future__ import annotations

import asyncio
import hashlib
import stat
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from mlxd_controller.fleet.facts import FileFact
from mlxd_models.files.model_files import file_error
from mlxd_models.files.model_source import files_of
from mlxd_models.files.stored_files import READ_FOLDERS, READ_SUFFIXES, StoredFiles
from mlxd_shared import config
from mlxd_shared.domain.errors import InvalidModel, InvalidRequest


@dataclass(frozen=True, slots=True)
class Offer:
    """The files that make up a model, and where each is. Both methods work on a thread.

    They raise InvalidModel, with the file's name, where the disk refuses it, or MachineShort.
    """

    facts: tuple[FileFact, ...]
    paths: tuple[Path, ...]

    async def read(self, number: int, offset: int) -> bytes:
        """Return at most FLEET_CHUNK_BYTES of a file from `offset` on; none at its end."""
        return await asyncio.to_thread(_read, self.paths[number], offset, self.facts[number].name)

    async def sha256(self, number: int) -> str:
        """Return a file's SHA-256 in hexadecimal digits."""
        return await asyncio.to_thread(_sum, self.paths[number], self.facts[number].name)


async def offer_of(path: Path) -> Offer:
    """Return the files of the model at `path`.

    Raises:
        InvalidModel: there is none, or it cannot be copied. MachineShort: see Offer.
    """
    files = await asyncio.to_thread(_list_files, path)
    return Offer(tuple(fact for fact, _ in files), tuple(place for _, place in files))


class Offers:
    """What an agent offers of its machine's models, by digest."""

    def __init__(self, find: Callable[[str, str], Awaitable[str | None]]) -> None:
        """find: returns where a model is here, see NodeFiles."""
        self._find = find
        self._offers: dict[str, Offer] = {}

    async def offer(self, digest: str, path: str) -> tuple[FileFact, ...] | None:
        """Return the files of a model that is here; None where it is nowhere here.

        Raises:
            InvalidModel, MachineShort: see `offer_of`.
        """
        place = await self._find(digest, path)
        if place is None:
            return None
        offer = await offer_of(Path(place))
        self._offers.pop(digest, None)
        self._offers[digest] = offer
        while len(self._offers) > config.FLEET_OFFERS_MAX:
            del self._offers[next(iter(self._offers))]
        return offer.facts

    async def read(self, digest: str, number: int, offset: int) -> bytes:
        """Return a part of a file; see Offer. Raises InvalidRequest if it is not offered."""
        return await self._look_up(digest, number).read(number, offset)

    async def sha256(self, digest: str, number: int) -> str:
        """Return a file's sum; see Offer. Raises InvalidRequest if it is not offered."""
        return await self._look_up(digest, number).sha256(number)

    def _look_up(self, digest: str, number: int) -> Offer:
        offer = self._offers.get(digest)
        if offer is None:
            raise InvalidRequest.of("digest", "this node does not offer it, or not any more")
        if not 0 <= number < len(offer.facts):
            raise InvalidRequest.of("number", f"{number} is none of {len(offer.facts)} files")
        return offer


def hash_file(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal digits. Blocks on the disk; raises OSError."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _list_files(path: Path) -> tuple[tuple[FileFact, Path], ...]:
    """Return the files that make up a model, and where each is."""
    files = files_of(path)
    if files.by_content:
        problem = "a model of Ollama's store is not copied; have it on the node, or in a folder"
        raise InvalidModel(problem)
    chosen = [each for each in _files_in(files) if each[1].suffix in READ_SUFFIXES]
    for folder in READ_FOLDERS & files.named.keys():
        chosen += _files_in(files.below(folder))
    return tuple(sorted(chosen, key=lambda each: each[0].name))


def _files_in(files: StoredFiles) -> list[tuple[FileFact, Path]]:
    """Return what is a file among all that is listed, also where a link leads to it."""
    regular = []
    for name, path in files.named.items():
        try:
            status = path.stat()
        except OSError as error:
            raise file_error(error, name) from error
        if stat.S_ISREG(status.st_mode):
            regular.append((FileFact(name, status.st_size), path))
    return regular


def _read(path: Path, offset: int, name: str) -> bytes:
    try:
        with path.open("rb") as file:
            file.seek(offset)
            return file.read(config.FLEET_CHUNK_BYTES)
    except OSError as error:
        raise file_error(error, name) from error


def _sum(path: Path, name: str) -> str:
    try:
        return hash_file(path)
    except OSError as error:
        raise file_error(error, name) from error
