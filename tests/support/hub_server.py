"""A hub on loopback: repositories of bytes, behind the addresses that huggingface_hub asks."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit


@dataclass(slots=True)
class Repository:
    """What a hub has under one name: a commit, its files and the revisions that lead to it."""

    commit: str
    files: dict[str, bytes]
    revisions: tuple[str, ...] = ("main",)
    refusal: tuple[int, str] | None = None
    """The status and the error code that every question about it is answered with."""


@dataclass(slots=True)
class FakeHub:
    """A hub, and what was asked of it."""

    repositories: dict[str, Repository]
    endpoint: str = ""
    requested: list[tuple[str, str, str]] = field(default_factory=list)
    """Method, path and range of each request."""
    cut_at: dict[str, int] = field(default_factory=dict)
    """Files whose connection breaks once, after so many bytes."""
    damaged: set[str] = field(default_factory=set)
    """Files that come with other bytes than they have."""
    etags: dict[str, str] = field(default_factory=dict)
    """What files are called that are not called by their hash."""
    refused: set[str] = field(default_factory=set)
    """Files that are told of, and not given."""
    moved: dict[str, str] = field(default_factory=dict)
    """Where files are really, by the method that is told so."""
    tokens: list[str] = field(default_factory=list)
    """What each request showed to be let in."""
    hold_at: dict[str, int] = field(default_factory=dict)
    """Files that stop coming after so many bytes, until they are released."""
    released: threading.Event = field(default_factory=threading.Event)
    broken_for_good: bool = False
    """Whether a connection that broke refuses every further one."""

    def ranges_of(self, name: str) -> list[str]:
        """Return the ranges in which the bytes of a file were asked for."""
        return [
            ran for method, path, ran in self.requested if method == "GET" and path.endswith(name)
        ]

    def begins_of(self, name: str) -> list[int]:
        """Return from which bytes on a file was asked for."""
        return [_begin_of(ran) for ran in self.ranges_of(name)]


def _begin_of(ran: str) -> int:
    return int((ran or "bytes=0-")[6:].partition("-")[0])


@contextmanager
def serving(hub: FakeHub) -> Iterator[FakeHub]:
    """Serve around the body."""

    class Handler(_Handler):
        """Answers for `hub`."""

        served = hub

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    hub.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield hub
    finally:
        hub.released.set()
        server.shutdown()
        thread.join()
        server.server_close()


def _lfs(content: bytes) -> dict[str, object]:
    """Return what a listing tells of a large file."""
    sha256 = hashlib.sha256(content).hexdigest()
    return {"size": len(content), "sha256": sha256, "pointerSize": 1}


class _Handler(BaseHTTPRequestHandler):
    """One connection."""

    served: FakeHub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        """Tell of a file."""
        self._answer()

    def do_GET(self) -> None:
        """Give a listing or a file's bytes."""
        self._answer()

    def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002 - the base's
        """Say nothing."""

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.served.requested.append((self.command, path, self.headers.get("Range", "")))
        self.served.tokens.append(self.headers.get("Authorization", ""))
        if path.startswith("/api/models/"):
            repository, _, revision = path.removeprefix("/api/models/").partition("/revision/")
            self._listing(repository, revision or "main")
            return
        repository, _, rest = path.lstrip("/").partition("/resolve/")
        revision, _, name = rest.partition("/")
        self._file(repository, revision, name)

    def _find(self, name: str, revision: str) -> Repository | None:
        repository = self.served.repositories.get(name)
        if repository is None:
            self._refuse(401, "RepoNotFound")
        elif repository.refusal is not None:
            self._refuse(*repository.refusal)
            return None
        elif revision not in (repository.commit, *repository.revisions):
            self._refuse(404, "RevisionNotFound")
            return None
        return repository

    def _refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        if code:
            self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _listing(self, name: str, revision: str) -> None:
        repository = self._find(name, revision)
        if repository is None:
            return
        files = [
            {"rfilename": file, "size": len(content), "blobId": "0" * 40, "lfs": _lfs(content)}
            for file, content in repository.files.items()
        ]
        body = json.dumps({"id": name, "sha": repository.commit, "siblings": files}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _send_away(self, content: bytes, commit: str) -> None:
        self.send_response(302)
        self.send_header("Location", self.served.moved[self.command] + self.path)
        self.send_header("X-Linked-Etag", f'"{hashlib.sha256(content).hexdigest()}"')
        self.send_header("X-Linked-Size", str(len(content)))
        self.send_header("X-Repo-Commit", commit)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _file(self, repository: str, revision: str, name: str) -> None:
        served = self._find(repository, revision)
        if served is None:
            return
        content = served.files.get(name)
        if content is None:
            self._refuse(404, "EntryNotFound")
            return
        if name in self.served.refused and self.command == "GET":
            self._refuse(403, "")
            return
        if self.command in self.served.moved:
            self._send_away(content, served.commit)
            return
        begin = _begin_of(self.headers.get("Range", ""))
        self.send_response(206 if begin else 200)
        etag = self.served.etags.get(name) or hashlib.sha256(content).hexdigest()
        self.send_header("ETag", f'"{etag}"')
        self.send_header("X-Repo-Commit", served.commit)
        self.send_header("Accept-Ranges", "bytes")
        if begin:
            self.send_header("Content-Range", f"bytes {begin}-{len(content) - 1}/{len(content)}")
        self.send_header("Content-Length", str(len(content) - begin))
        self.end_headers()
        if self.command == "HEAD":
            return
        if name in self.served.damaged:
            content = bytes(len(content))
        end = self.served.cut_at.pop(name, len(content))
        pause = self.served.hold_at.get(name)
        try:
            if pause is not None and begin < pause:
                self.wfile.write(content[begin:pause])
                self.wfile.flush()
                self.served.released.wait()
                begin = pause
            self.wfile.write(content[begin:end])
        except ConnectionError:  # who asked has gone
            self.close_connection = True
            return
        if end < len(content):
            if self.served.broken_for_good:
                self.served.repositories.clear()
            self.wfile.flush()
            self.close_connection = True
