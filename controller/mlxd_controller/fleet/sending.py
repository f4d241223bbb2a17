"""Sends a model's files to a node that has them nowhere, from the controller's own disk."""

from __future__ import annotations

import asyncio
import stat
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from pathlib import Path

from mlxd_controller.fleet.files import FileFact
from mlxd_controller.fleet.node import Node
from mlxd_models.files.model_files import file_error
from mlxd_models.files.model_source import files_of
from mlxd_models.files.stored_files import READ_FOLDERS, READ_SUFFIXES, StoredFiles
from mlxd_shared import config
from mlxd_shared.domain.errors import InvalidModel
from mlxd_shared.domain.figures import LoadProgress

STAGE = "fetching"
"""What a load's progress says while files are copied."""


@dataclass(frozen=True, slots=True)
class Sent:
    """A model's place on a node."""

    path: str


async def send_model(
    node: Node, digest: str, path: Path
) -> AsyncGenerator[LoadProgress | Sent, None]:
    """Have a node find a model, or copy it there with progress; the last value is its place.

    Raises:
        InvalidModel: the files here cannot be read or copied, or the copy is another model.
        MachineShort: this machine lacks what reading them takes.
        PullFailed, StoreFull, InvalidRequest: see NodeFiles.
    """
    there = await node.find_model(digest, str(path))
    if there is not None:
        yield Sent(there)
        return
    files = await asyncio.to_thread(_list_files, path)
    facts = tuple(fact for fact, _ in files)
    here = await node.begin_copy(digest, facts)
    total, done = sum(fact.nbytes for fact in facts), sum(here)
    yield LoadProgress(STAGE, done, total)
    for number, (fact, source) in enumerate(files):
        offset = here[number]
        while chunk := await asyncio.to_thread(_read, source, offset, fact.name):
            await node.write_copy(digest, number, offset, chunk)
            offset += len(chunk)
            done += len(chunk)
            yield LoadProgress(STAGE, done, total)
    yield Sent(await node.finish_copy(digest))


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
