"""Pulling through huggingface_hub: its cache, its tokens, its layout; and downloads that resume.

The library restarts a file in each process. So a file that its server offers as plain bytes is
downloaded here into the cache, from where the last attempt ended, in the library's own layout.

A file counts once its bytes have the hash that the server announced. A revision's name leads to a
snapshot only once all of this pull is there, so that no reader of the cache finds half a model.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import stat
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, BinaryIO

from mlxd_controller.pulling.choosing import RemoteFile, check_names, choose_needed
from mlxd_controller.pulling.hub_api import Hub, RemotePart, error_of_system
from mlxd_controller.pulling.leftovers import drop_leftovers
from mlxd_controller.pulling.room import FreeOf, check_reserve, check_room, free_nbytes
from mlxd_controller.pulling.wanted import Wanted
from mlxd_models.files.digest import model_digest
from mlxd_models.files.model_files import parse_json_object, read_file
from mlxd_models.files.weights import INDEX_FILE
from mlxd_shared.config import SAFETENSORS_HEADER_BYTES_MAX
from mlxd_shared.domain.errors import InvalidModel, PullFailed, PullInterrupted
from mlxd_shared.domain.pulls import PulledModel, PullPhase, PullProgress

UNFINISHED = ".mlxd-unfinished"
_COMMIT = re.compile(r"[0-9a-f]{40}")
_HASHED_BYTES = 1 << 20
_SHA256_CHARS = 64

Report = Callable[[PullProgress], None]
"""Called with each step, some of them every few megabytes."""


def pull(hub: Hub, wanted: Wanted, report: Report, *, free_of: FreeOf = free_nbytes) -> PulledModel:
    """Download a revision into the cache and return where it is; blocks until then.

    Raises:
        ModelNotFound: the hub has no such model or revision.
        HubUnavailable, HubDenied: the hub does not answer, or refuses.
        StoreFull: the disk has no room for it.
        PullInterrupted: what arrived is cut off or damaged, or another process pulls it too.
        PullFailed: the disk refuses, or the hub says what it should not.
        InvalidModel: the repository is not a model that could be served; names the file.
        InvalidRequest: `include` matches files that are never taken.
    """
    report(PullProgress(PullPhase.LISTING))
    commit, files = hub.listing(wanted.repository, wanted.revision)
    if not _COMMIT.fullmatch(commit):
        raise PullFailed(f"the hub says {wanted.revision!r} is {commit!r:.80}, not a commit")
    check_names(files)
    one = _Pull(hub, wanted, commit, report, free_of)
    drop_leftovers(wanted.folder)
    try:
        chosen = choose_needed(files, index=one.index(files), include=wanted.include)
        one.check_room(chosen)
        # Weights last: a folder without weights does not count as a model yet.
        for file in sorted(chosen, key=lambda f: (f.name.endswith(".safetensors"), f.name)):
            one.fetch(file)
        one.publish()
    except OSError as error:
        raise error_of_system(error) from error
    return PulledModel(
        name=wanted.name,
        repository=wanted.repository,
        revision=wanted.revision,
        commit=commit,
        path=str(one.snapshot),
        digest=_digest_of(one.snapshot),
        files=len(chosen),
        nbytes=sum(file.nbytes for file in chosen),
    )


def _digest_of(snapshot: Path) -> str:
    """Return the model's digest; empty: not even its files are in order."""
    try:
        return model_digest(snapshot)
    except InvalidModel:
        return ""


class _Pull:
    """A pull in progress."""

    def __init__(
        self, hub: Hub, wanted: Wanted, commit: str, report: Report, free_of: FreeOf
    ) -> None:
        self._hub = hub
        self._free_of = free_of
        self._wanted = wanted
        self._commit = commit
        self._report = report
        self._folder = wanted.folder
        self._disk = f"the disk of {self._folder}"
        self._blobs = self._folder / "blobs"
        self.snapshot = self._folder / "snapshots" / commit
        self._total = 0
        self._here = 0

    def index(self, files: Collection[RemoteFile]) -> dict[str, Any] | None:
        """Return the index of shards, pulled first because it names the weights."""
        file = next((file for file in files if file.name == INDEX_FILE), None)
        if file is None:
            return None
        if file.nbytes > SAFETENSORS_HEADER_BYTES_MAX:
            raise InvalidModel(f"over {SAFETENSORS_HEADER_BYTES_MAX} bytes long", file=INDEX_FILE)
        self.fetch(file)
        raw = read_file(self.snapshot / INDEX_FILE, bytes_max=SAFETENSORS_HEADER_BYTES_MAX)
        return parse_json_object(raw or b"", file=INDEX_FILE)

    def check_room(self, chosen: Collection[RemoteFile]) -> None:
        """Refuse what the disk cannot hold beside PULL_RESERVE_BYTES, before any of it comes.

        Raises:
            StoreFull: naming what is free, needed and in reserve.
        """
        self._total, self._here = sum(file.nbytes for file in chosen), 0
        missing = sum(map(self._missing_nbytes, chosen))
        check_room(self._disk, self._free_of(self._folder), missing)

    def fetch(self, file: RemoteFile) -> None:
        """Ensure that a file is in the snapshot."""
        before, path = self._here, self.snapshot / file.name
        if not _is_whole(path, file.nbytes):
            self._hub.reporting = lambda nbytes: self._count_bytes(file, before, nbytes)
            wanted = self._wanted
            part = self._hub.part(wanted.repository, file.name, self._commit)
            blob = self._blobs / part.etag
            if part.plain:
                self._fetch_plain(file, part, blob, before)
                _link(path, blob)
            else:
                _drop_damaged(path, blob)
                self._hub.place(wanted.repository, file.name, self._commit, wanted.cache)
        self._here = before + file.nbytes
        self._tell(PullPhase.DOWNLOADING, file, before)

    def publish(self) -> None:
        """Make the revision's name lead to the snapshot."""
        revision = self._wanted.revision
        if revision == self._commit:
            return
        ref = self._folder / "refs" / revision
        ref.parent.mkdir(parents=True, exist_ok=True)
        fresh = ref.with_name(f".{ref.name}.{os.getpid()}")
        fresh.write_text(self._commit, encoding="ascii")
        fresh.replace(ref)

    def _count_bytes(self, file: RemoteFile, before: int, nbytes: int) -> None:
        self._here += nbytes
        self._tell(PullPhase.DOWNLOADING, file, before)
        self._check_reserve()

    def _check_reserve(self) -> None:
        """Stop before the disk is full: other pulls, each with room at its start, fill it too.

        Raises:
            StoreFull: less than PULL_RESERVE_BYTES is free.
        """
        if self._total:
            check_reserve(self._disk, self._free_of(self._folder))

    def _tell(self, phase: PullPhase, file: RemoteFile, before: int) -> None:
        """Report a step; `before` are the bytes of all files before this one."""
        kind = "sha256" if len(file.content) == _SHA256_CHARS else "git"
        step = PullProgress(
            phase,
            file=file.name,
            file_digest=f"{kind}:{file.content}" if file.content else "",
            file_done_nbytes=self._here - before,
            file_size_nbytes=file.nbytes,
            done_nbytes=self._here if self._total else 0,
            total_nbytes=self._total,
        )
        self._report(step)

    def _missing_nbytes(self, file: RemoteFile) -> int:
        """Return how much of a file is missing, by what is known before it is requested."""
        blob = self._blobs / file.content if file.content else self.snapshot / file.name
        if any(_is_whole(path, file.nbytes) for path in (self.snapshot / file.name, blob)):
            return 0
        unfinished = _unfinished_path(blob)
        begun = unfinished.stat().st_size if unfinished.exists() else 0
        return max(0, file.nbytes - begun)

    def _fetch_plain(self, file: RemoteFile, part: RemotePart, blob: Path, before: int) -> None:
        """Ensure that a file's bytes are among the blobs."""
        if _is_whole(blob, part.nbytes or file.nbytes):
            return
        blob.parent.mkdir(parents=True, exist_ok=True)
        unfinished = _unfinished_path(blob)
        with unfinished.open("ab+") as stream:
            _lock(stream, unfinished, file.name)
            begun = stream.seek(0, os.SEEK_END)
            if part.nbytes is not None and begun > part.nbytes:
                begun = stream.truncate(0)
            self._count_bytes(file, before, begun)
            self._hub.download(part, stream, begun)
            stream.flush()
            os.fsync(stream.fileno())
            self._tell(PullPhase.VERIFYING, file, before)
            if hash_like(part.etag, stream) != part.etag:
                unfinished.unlink()
                raise PullInterrupted(f"{file.name} arrived damaged and was dropped; pull again")
            unfinished.replace(blob)


def _unfinished_path(blob: Path) -> Path:
    return blob.with_name(blob.name + UNFINISHED)


def _is_whole(path: Path, nbytes: int) -> bool:
    """Return whether there is a file, of this length if that is known; links are followed."""
    try:
        status = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return stat.S_ISREG(status.st_mode) and nbytes in (0, status.st_size)


def _link(path: Path, blob: Path) -> None:
    """Make a snapshot's file a link to its blob, or a copy if the file system has no links."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    try:
        path.symlink_to(os.path.relpath(blob, path.parent))
    except FileExistsError:  # made by another pull
        return
    except OSError:
        shutil.copyfile(blob, path)


def _drop_damaged(path: Path, blob: Path) -> None:
    """Remove a file that is not whole: the library would take it as it is."""
    if path.exists():
        blob.unlink(missing_ok=True)
    path.unlink(missing_ok=True)


def _lock(stream: BinaryIO, path: Path, name: str) -> None:
    """Lock a file that is being downloaded.

    Raises:
        PullInterrupted: another pull has it, or has just completed it.
    """
    try:
        fcntl.flock(stream.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise PullInterrupted(f"another pull fetches {name}; wait for it") from error
    if not path.exists() or not os.path.samestat(os.fstat(stream.fileno()), path.stat()):
        raise PullInterrupted(f"another pull has just fetched {name}; pull again")


def hash_like(content: str, stream: BinaryIO) -> str:
    """Return a file's hash, of the kind that `content` is: SHA-256, or git's for small files."""
    nbytes = stream.seek(0, os.SEEK_END)
    stream.seek(0)
    hasher = hashlib.sha256()
    if len(content) == 40:
        hasher = hashlib.sha1(f"blob {nbytes}\0".encode(), usedforsecurity=False)
    while part := stream.read(_HASHED_BYTES):
        hasher.update(part)
    return hasher.hexdigest()
