"""The cache of Hugging Face's libraries: what they have downloaded, under the hub's names.

    ROOT/models--ORG--NAME/refs/REVISION           a commit
    ROOT/models--ORG--NAME/snapshots/COMMIT/FILE   a link to ../../blobs/ETAG

A model is ORG/NAME, which is its revision `main`, or ORG/NAME@REVISION: a branch, tag or commit.

The cache is never written to. No part of a name can lead out of it: `..`, separators, and links
that leave the repository's folder are refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from mlxd_controller.runtime.ports import HubOrigin, StoreKind
from mlxd_controller.store.shelf import Place, entries, is_file, is_folder, is_name
from mlxd_models.files.model_config import CONFIG_FILE
from mlxd_models.files.model_files import read_file
from mlxd_models.files.stored_files import (
    HUB_REPOSITORY_PREFIX,
    HUB_SNAPSHOTS,
    READ_FOLDERS,
    READ_SUFFIXES,
    StoredFiles,
    check_inside,
)
from mlxd_shared.domain.errors import InvalidModel, MlxdError

MAIN = "main"
REF_BYTES_MAX = 256
REF_DEPTH_MAX = 4
REFS_MAX = 1024

_REFS = "refs"
_WEIGHTS = ".safetensors"
_PART = re.compile(r"\w(?:[\w.-]*\w)?")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_HASH = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")


class HubShelf:
    """Implements Shelf over a hub's cache."""

    kind = StoreKind.HUB

    def __init__(self, root: Path) -> None:
        """root: the cache's directory; if it is missing there are no models."""
        self._root = root

    def places(self) -> Iterator[Place]:
        """Yield each revision that has a name and weights; see Shelf."""
        for folder in entries(self._root):
            repository = _repository_of(folder)
            if repository is not None and is_folder(self._root / folder):
                yield from self._revisions(repository, self._root / folder)

    def find(self, name: str) -> Place | None:
        """Return the place of a revision's snapshot; see Shelf."""
        repository, _, revision = name.partition("@")
        parts = repository.split("/")
        if len(parts) > 2 or not all(_is_part(part) and "--" not in part for part in parts):
            return None
        folder = self._root / (HUB_REPOSITORY_PREFIX + "--".join(parts))
        if not is_folder(folder):
            return None
        revision = revision or MAIN
        name = repository if revision == MAIN else name
        if not all(_is_part(part) for part in revision.split("/")):
            return None
        if _COMMIT.fullmatch(revision) and is_folder(folder / HUB_SNAPSHOTS / revision):
            return self._place(name, folder, revision)
        ref = folder / _REFS / revision
        return self._follow_ref(name, folder, ref) if is_file(ref) else None

    def _revisions(self, repository: str, folder: Path) -> Iterator[Place]:
        try:
            for path in (folder, folder / _REFS, folder / HUB_SNAPSHOTS):
                check_inside(path, self._root.resolve(), name=_shorten_path(folder, path))
        except MlxdError as error:
            yield Place(repository, folder, self.kind, error)
            return
        refs = list(_refs(folder / _REFS, depth=REF_DEPTH_MAX))[:REFS_MAX]
        names = {ref: repository if ref == MAIN else f"{repository}@{ref}" for ref in refs}
        places = [
            self._follow_ref(name, folder, folder / _REFS / ref)
            for ref, name in names.items()
            if is_name(name)
        ]
        named = {place.path.name for place in places}
        places += [
            self._place(f"{repository}@{commit}", folder, commit)
            for commit in entries(folder / HUB_SNAPSHOTS)
            if commit not in named and _COMMIT.fullmatch(commit)
        ]
        yield from (p for p in places if p.error is not None or _might_be_served(p.path))

    def _follow_ref(self, name: str, folder: Path, ref: Path) -> Place:
        """Return the place of the commit that a ref's file names."""
        try:
            check_inside(ref, self._root.resolve(), name=_shorten_path(folder, ref))
            raw = read_file(ref, bytes_max=REF_BYTES_MAX, name=_shorten_path(folder, ref)) or b""
            commit = raw.decode("ascii", errors="replace").strip()
            if not _COMMIT.fullmatch(commit):
                raise InvalidModel(f"{commit!r:.80} is not a commit", _shorten_path(folder, ref))
        except MlxdError as error:
            return Place(name, ref, self.kind, error)
        return self._place(name, folder, commit)

    def _place(self, name: str, folder: Path, commit: str) -> Place:
        snapshot = folder / HUB_SNAPSHOTS / commit
        try:
            check_inside(snapshot, folder.resolve(), name=_shorten_path(folder, snapshot))
            check_inside(folder, self._root.resolve(), name=folder.name)
            if not is_folder(snapshot):
                problem = "the snapshot is not there: a download that has not begun"
                raise InvalidModel(problem, file=_shorten_path(folder, snapshot))
        except MlxdError as error:
            return Place(name, snapshot, self.kind, error)
        return Place(name, snapshot.resolve(), self.kind)


def origin_of(files: StoredFiles) -> HubOrigin | None:
    """Return which files of a hub a model's are; None: they are no snapshot of a hub's cache.

    A snapshot's links lead to files that are called by their hash. Blocks on the disk.

    Raises:
        InvalidModel: a folder of the model cannot be listed.
    """
    snapshot = files.path
    repository = _repository_of(snapshot.parent.parent.name)
    is_snapshot = snapshot.parent.name == HUB_SNAPSHOTS and _COMMIT.fullmatch(snapshot.name)
    if repository is None or not is_snapshot or files.by_content:
        return None
    paths = dict(files.named)
    for folder in READ_FOLDERS & files.named.keys():
        paths |= files.below(folder).named
    contents = (
        (name, _content_of(path))
        for name, path in sorted(paths.items())
        if path.suffix in READ_SUFFIXES
    )
    known = tuple((name, content) for name, content in contents if _HASH.fullmatch(content))
    return HubOrigin(repository, snapshot.name, known)


def _content_of(path: Path) -> str:
    """Return what the file is called that a link leads to; "" for none."""
    try:
        return path.readlink().name
    except OSError:  # no link, or it went just now: whoever reads the model says so
        return ""


def _repository_of(folder: str) -> str | None:
    """Return the repository that a directory of the cache belongs to."""
    parts = folder.removeprefix(HUB_REPOSITORY_PREFIX).split("--")
    if not folder.startswith(HUB_REPOSITORY_PREFIX) or len(parts) > 2:
        return None
    return "/".join(parts) if all(_is_part(part) for part in parts) else None


def _is_part(text: str) -> bool:
    return ".." not in text and _PART.fullmatch(text) is not None


def _refs(folder: Path, *, depth: int) -> Iterator[str]:
    """Yield the revisions that have a ref; a branch's name may contain separators."""
    for name in entries(folder):
        path = folder / name
        if path.is_symlink() or not _is_part(name):
            continue
        if not is_folder(path):
            yield name
        elif depth > 1:
            yield from (f"{name}/{below}" for below in _refs(path, depth=depth - 1))


def _might_be_served(snapshot: Path) -> bool:
    """Return whether a snapshot holds a model, at least in part."""
    names = entries(snapshot)
    return CONFIG_FILE in names and any(name.endswith(_WEIGHTS) for name in names)


def _shorten_path(folder: Path, path: Path) -> str:
    """Return a path in a repository's folder as errors show it."""
    return str(path.relative_to(folder.parent))
