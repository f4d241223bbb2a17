"""A model's files wherever they lie: the names that readers ask for, and where each one is.

Invariants:
- Whoever reads a model asks one such value, made once, so that a store which changes meanwhile is
  never seen half before and half after.
- Every path in it lies in the store that it was made of, also where links are followed: one that
  leads out is refused by name, and nothing behind it is opened.
- A link that leads out or to nothing is never taken for a file that the model does not have: who
  asks for it, or for a file behind it, is refused by its name.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlxd_models.files.model_files import file_error, parse_json_object, read_file
from mlxd_shared.config import CONFIG_FILE_BYTES_MAX, FOLDER_ENTRIES_MAX
from mlxd_shared.domain.errors import InvalidModel

READ_SUFFIXES = frozenset({".json", ".jinja", ".safetensors"})
"""Of files that are read if they are there; others only where an index names them."""
READ_FOLDERS = frozenset({"1_Pooling", "additional_chat_templates"})
"""Of folders in a model's own that are read if they are there."""
OTHER_WEIGHTS = frozenset(
    {".bin", ".ckpt", ".gguf", ".h5", ".msgpack", ".npz", ".pickle", ".pkl", ".pt", ".pth"}
)
"""Of weights in formats that are not served, several of which would run code when read."""
GGUF_SUFFIX = ".gguf"
GGUF_PROBLEM = "GGUF: these weights are for another engine; mlxd serves safetensors"

TO_NOTHING = "a link to nothing"
HUB_REPOSITORY_PREFIX = "models--"
HUB_SNAPSHOTS = "snapshots"
HUB_SHARED_BLOBS = "blobs"
"""In a hub's cache, for all its repositories; each has a directory of this name of its own too."""

Signature = tuple[tuple[str, int, int, int], ...]
"""Names, sizes, times of content and of change: what tells whether files have to be read again.

The time of change moves with permissions too, and nobody can set it back.
"""


@dataclass(frozen=True, slots=True)
class Blob:
    """A file of tensors that is named by its content. `name` is what its store calls it."""

    name: str
    path: Path


@dataclass(frozen=True, slots=True)
class StoredFiles:
    """Where the files of one model are. `path` is its folder, or the manifest that lists them."""

    path: Path
    named: Mapping[str, Path]
    blobs: tuple[Blob, ...] = ()
    """Weights that have no names of files; empty: they are among `named`."""
    others: tuple[str, ...] = ()
    """Names of weights in formats that are not served."""
    astray: Mapping[str, str] = field(default_factory=dict)
    """Links that lead to no file of the model, by name, each with what is wrong with it."""

    @property
    def by_content(self) -> bool:
        """Whether files are named by their content."""
        return bool(self.blobs)

    def label(self, name: str) -> str:
        """Return a file's name for errors, with the name of its blob if it has one."""
        path = self.path_of(name)
        own = name.rpartition("/")[2]
        return name if path is None or path.name == own else f"{name} in {path.name}"

    def path_of(self, name: str) -> Path | None:
        """Return where a file is; None where the model has no such file.

        name: FOLDER/NAME for a file in one of its folders, which is listed now, on the disk.

        Raises:
            InvalidModel: it, or its folder, is a link that leads out or to nothing; or that folder
                is none, or cannot be listed.
        """
        folder, slash, _ = name.partition("/")
        path = self.named.get(name)
        if path is not None:
            return path
        for part in (name, folder):
            if part in self.astray:
                raise InvalidModel(self.astray[part], file=part)
        if not slash or folder not in self.named:
            return None
        return self.below(folder).path_of(name)

    def below(self, folder: str) -> StoredFiles:
        """Return the files of one of the model's folders, by FOLDER/NAME, as they are now.

        Raises:
            InvalidModel: it is no folder, or cannot be listed.
        """
        path = self.named[folder]
        if not os.path.isdir(path):  # noqa: PTH112 - no error but false
            raise InvalidModel("is not a folder", file=folder)
        return open_folder(path, inside=_inside(self.path), prefix=f"{folder}/")

    def read(self, name: str, *, bytes_max: int = CONFIG_FILE_BYTES_MAX) -> bytes | None:
        """Return a file's bytes; None where the model has no such file. Blocks on the disk.

        Raises:
            InvalidModel: as `path_of`; or over `bytes_max`, unreadable, or not a regular file.
        """
        path = self.path_of(name)
        if path is None:
            return None
        return read_file(path, bytes_max=bytes_max, name=self.label(name))

    def read_json(self, name: str, *, bytes_max: int = CONFIG_FILE_BYTES_MAX) -> dict[str, Any]:
        """Return a JSON file's object, empty if there is none; raises as `read`, or if invalid."""
        raw = self.read(name, bytes_max=bytes_max)
        return {} if raw is None else parse_json_object(raw, file=self.label(name))

    def nbytes(self, name: str) -> int:
        """Return a file's size; 0 if there is none, which readers refuse."""
        path = self.named.get(name)
        try:
            return 0 if path is None else path.stat().st_size
        except OSError:
            return 0

    def signature(self) -> Signature:
        """Return what changes when a file does; raises InvalidModel if one has gone."""
        paths = {**self.named, **{blob.path.name: blob.path for blob in self.blobs}}
        for folder in READ_FOLDERS & self.named.keys():
            paths |= self.below(folder).named
        if self.by_content:
            paths[""] = self.path
        signature = []
        for name, path in sorted(paths.items()):
            try:
                status = path.stat()
            except OSError as error:
                raise file_error(error, path.name) from error
            signature.append((name, status.st_size, status.st_mtime_ns, status.st_ctime_ns))
        return tuple(signature)


def open_folder(folder: Path, *, inside: tuple[Path, ...] = (), prefix: str = "") -> StoredFiles:
    """Return the files of a folder; a snapshot of a hub's cache may link to its repository's.

    inside: where its links may lead; empty: where those of a model's folder may.
    prefix: what stands before each name: the folder's own and a slash, where it is one of a model.

    Raises:
        InvalidModel: the folder cannot be listed, or a file in it is a link that leads out.
    """
    named: dict[str, Path] = {}
    others: list[str] = []
    astray: dict[str, str] = {}
    inside = inside or _inside(folder)
    for entry in _entries(folder):
        suffix = os.path.splitext(entry.name)[1]  # noqa: PTH122 - a name, not a path
        path = folder / entry.name
        if suffix in OTHER_WEIGHTS:
            others.append(entry.name)
            continue
        name = prefix + entry.name
        problem = _link_problem(path, inside, name=name) if entry.is_symlink() else None
        if problem is None:
            named[name] = path
        elif problem.problem != TO_NOTHING and (
            suffix in READ_SUFFIXES or entry.name in READ_FOLDERS
        ):
            raise problem
        else:
            astray[name] = problem.problem  # refused where somebody asks for it
    return StoredFiles(folder, named, others=tuple(sorted(others)), astray=astray)


def check_inside(path: Path, *inside: Path, name: str) -> None:
    """Raise InvalidModel if a path leads out of all of `inside`, folders without links above."""
    try:
        real = path.resolve()
    except (OSError, RuntimeError) as error:
        raise InvalidModel("a loop of links", file=name) from error
    if not any(real.is_relative_to(folder) for folder in inside):
        raise InvalidModel(f"a link that leads out of {inside[0].name or inside[0]}", file=name)


def _link_problem(path: Path, inside: Sequence[Path], *, name: str) -> InvalidModel | None:
    """Return why a link may not be followed; None where it may."""
    try:
        check_inside(path, *inside, name=name)
        is_there = path.exists()
    except InvalidModel as error:
        return error
    except OSError:  # what may not be looked at is refused when it is read
        is_there = True
    return None if is_there else InvalidModel(TO_NOTHING, file=name)


def _inside(folder: Path) -> tuple[Path, ...]:
    """Return the folders that links of a model's folder may lead to."""
    repository = folder.parent.parent
    cached = repository.name.startswith(HUB_REPOSITORY_PREFIX)
    if cached and folder.parent.name == HUB_SNAPSHOTS:
        shared = repository.parent.resolve() / HUB_SHARED_BLOBS
        own = (repository.resolve(),)
        return own if shared.is_symlink() else (*own, shared)
    return (folder.resolve(),)


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    folder_entries: list[os.DirEntry[str]] = []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.name.isprintable():  # else nothing could ask for it, and no error name it
                    folder_entries.append(entry)
                if len(folder_entries) > FOLDER_ENTRIES_MAX:
                    raise InvalidModel(f"over {FOLDER_ENTRIES_MAX} entries", file=folder.name)
    except OSError as error:
        raise file_error(error, folder.name) from error
    return folder_entries
