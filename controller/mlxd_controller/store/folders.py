"""The folder store: names that point at folders, given at serve or added by a load.

Invariants:
- A folder is read again only when a file in it has changed (name, size or time of change).
- Names of one digest are one model: the first in alphabetical order is its name, the rest aliases.
- One broken folder hides no other: it is listed with its error, and refused when asked for.
- Files are read on a thread, one read at a time.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from mlxd_controller.ports import BrokenRef, ModelRef
from mlxd_controller.store.facts import Folder, read_folder
from mlxd_shared import config
from mlxd_shared.errors import InvalidModel, InvalidRequest, MlxdError, ModelNotFound, QueueFull

_NAME = re.compile(r"[\w][\w.:@+/-]*")
_SUFFIXES = (".json", ".jinja", ".safetensors")
NAMES_IN_HINT_MAX = 8

Signature = tuple[tuple[str, int, int], ...]


@dataclass(frozen=True, slots=True)
class _Entry:
    """A folder as it was when its signature was taken: read, or broken."""

    signature: Signature
    folder: Folder | None = None
    error: MlxdError | None = None


class FolderStore:
    """Implements ports.ModelStore over folders."""

    def __init__(self, models: Iterable[tuple[str, Path]]) -> None:
        """Take the configured names; nothing is read yet.

        Raises:
            InvalidRequest: a name is given twice, or is not a name; or a path is not text.
            QueueFull: more names than MODELS_MAX.
        """
        self._paths: dict[str, Path] = {}
        self._entries: dict[Path, _Entry] = {}
        self._refs: dict[str, ModelRef] = {}
        self._reading = asyncio.Lock()
        for name, path in models:
            if name in self._paths:
                raise InvalidRequest.of("models", f"the name {name!r} is given twice")
            self._take(name, _resolved(path))

    async def resolve(self, name: str) -> ModelRef:
        """Return the model of a name, alias or digest; see the port."""
        if name in self._paths:
            path = self._paths[name]
            return self._ref(path, await self._read_good(path))
        for path in self._folders_of(name):
            entry = await self._read(path)
            if self._is(path, name):  # still: a changed folder is another model
                return self._ref(path, entry)
        names = ", ".join(sorted(self._paths)[:NAMES_IN_HINT_MAX])
        raise ModelNotFound(name, f"known: {names}" if names else "none is configured")

    def only_name(self) -> str:
        """Return the name to take where none is given; see the port."""
        if len(set(self._paths.values())) == 1:
            return min(self._paths)
        raise InvalidRequest.of("model", f"name one: {len(self._paths)} models are configured")

    async def inspect(self, path: Path, *, name: str) -> ModelRef:
        """Return the model of a folder without taking it in; see the port."""
        path = await self._checked(path, name)
        folder = (await self._read_good(path)).folder
        assert folder is not None
        return ModelRef(folder.digest, name or path.name, (), path, folder.facts, folder.defaults)

    async def add(self, path: Path, *, name: str) -> ModelRef:
        """Take a folder in; see the port. A folder that cannot be served is not taken in."""
        path = await self._checked(path, name)
        entry = await self._read_good(path)
        self._take(name or path.name, path)
        return self._ref(path, entry)

    async def listed(self) -> tuple[ModelRef | BrokenRef, ...]:
        """Return every model once, sorted by name."""
        named = sorted(self._paths.items())
        entries = [await self._read(path) for _, path in named]
        found: dict[str, ModelRef | BrokenRef] = {}
        digests: set[str] = set()
        for (name, path), entry in zip(named, entries, strict=True):
            if entry.error is not None:
                found[name] = BrokenRef(name, path, entry.error)
            elif entry.folder is not None and entry.folder.digest not in digests:
                digests.add(entry.folder.digest)
                ref = self._ref(path, entry)
                found[ref.name] = ref
        return tuple(found[name] for name in sorted(found))

    def known(self, digest: str) -> ModelRef | None:
        """Return the model of a digest as it was last read."""
        return self._refs.get(digest)

    def _take(self, name: str, path: Path) -> None:
        _check_name(name)
        if name not in self._paths and len(self._paths) >= config.MODELS_MAX:
            raise QueueFull("models", config.MODELS_MAX)
        self._paths[name] = path

    async def _checked(self, path: Path, name: str) -> Path:
        """Return the folder itself, if it may be served under `name`."""
        path = await asyncio.to_thread(_existing, path)
        name = name or path.name
        _check_name(name)
        if self._paths.get(name, path) != path:
            raise InvalidRequest.of("name", f"{name!r} is the name of another folder")
        return path

    def _folders_of(self, digest: str) -> list[Path]:
        """Return the folders that had this digest when they were last read."""
        return sorted({path for path in self._paths.values() if self._is(path, digest)})

    async def _read_good(self, path: Path) -> _Entry:
        entry = await self._read(path)
        if entry.error is not None:
            raise entry.error
        return entry

    async def _read(self, path: Path) -> _Entry:
        async with self._reading:
            entry = await asyncio.to_thread(_read_entry, path, self._entries.get(path))
            self._entries[path] = entry
            return entry

    def _ref(self, path: Path, entry: _Entry) -> ModelRef:
        assert entry.folder is not None
        digest = entry.folder.digest
        names = sorted(name for name, other in self._paths.items() if self._is(other, digest))
        ref = ModelRef(
            digest, names[0], tuple(names[1:]), path, entry.folder.facts, entry.folder.defaults
        )
        self._refs[digest] = ref
        return ref

    def _is(self, path: Path, digest: str) -> bool:
        entry = self._entries.get(path)
        return entry is not None and entry.folder is not None and entry.folder.digest == digest


def _existing(path: Path) -> Path:
    """Return the folder that `path` leads to.

    Raises:
        ModelNotFound: none, or none that may be looked at.
        InvalidRequest: its own path is not text.
    """
    try:
        if path.is_dir():
            return _resolved(path)
    except OSError as error:  # such as a path that is too long
        raise ModelNotFound(str(path), error.strerror or "unreadable") from error
    raise ModelNotFound(str(path), "there is no such folder")


def _resolved(path: Path) -> Path:
    """Return the path without links, which messages can carry."""
    try:
        path = path.resolve()
        str(path).encode()
    except (RuntimeError, UnicodeEncodeError) as error:
        problem = "not UTF-8" if isinstance(error, UnicodeEncodeError) else "a loop of links"
        raise InvalidRequest.of("model", f"the path {str(path)!r} is {problem}") from error
    return path


def _check_name(name: str) -> None:
    if len(name) > config.MODEL_NAME_CHARS_MAX or not _NAME.fullmatch(name):
        limit = f"1 to {config.MODEL_NAME_CHARS_MAX} letters, digits and ._:@+/-"
        raise InvalidRequest.of("name", f"{name!r} is not {limit}")


def _read_entry(path: Path, before: _Entry | None) -> _Entry:
    try:
        signature = _signature(path)
    except OSError as error:
        problem = InvalidModel(error.strerror or "unreadable", file=path.name)
        return _Entry((), error=problem)
    if before is not None and before.signature == signature and signature:
        return before
    try:
        return _Entry(signature, read_folder(path))
    except InvalidModel as error:
        return _Entry(signature, error=error)


def _signature(path: Path) -> Signature:
    found = []
    for child in sorted(path.iterdir()):
        if child.suffix in _SUFFIXES:
            stat = child.stat()
            found.append((child.name, stat.st_size, stat.st_mtime_ns))
    return tuple(found)
