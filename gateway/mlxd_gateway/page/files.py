"""The files of the page, and the policy that browsers hold it to.

Invariants:
- What is served is read once, when this module is imported, and is no secret: no credentials are
  asked for it. Any other path below `/page/` is not there.
- A browser runs no script and loads nothing but these files, talks to this server alone, and shows
  the page in no other. Text never becomes markup (`require-trusted-types-for`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from types import MappingProxyType

from starlette.requests import Request
from starlette.responses import Response

ROOT = "/page/"
_FOLDER = Path(__file__).parent / "static"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' data:",  # those that are shown to a model, in the page that has read them
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
HEADERS: Mapping[str, str] = MappingProxyType(
    {
        "Content-Security-Policy": POLICY,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cross-Origin-Opener-Policy": "same-origin",
        "Cross-Origin-Resource-Policy": "same-origin",
        "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
        "Cache-Control": "no-cache",
    }
)


@dataclass(frozen=True, slots=True)
class File:
    """One file as it is sent."""

    content: bytes
    media_type: str
    etag: str


def _read_files() -> Mapping[str, File]:
    files: dict[str, File] = {}
    for path in sorted(_FOLDER.rglob("*")):
        media_type = _TYPES.get(path.suffix)
        if media_type is None:
            continue
        content = path.read_bytes()
        name = path.relative_to(_FOLDER).as_posix()
        etag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
        files[ROOT + name] = File(content, media_type, etag)
    files[ROOT] = files.pop(ROOT + "index.html")
    return MappingProxyType(files)


FILES = _read_files()
"""By the path under which each is served."""


async def send_file(request: Request) -> Response:
    """GET /page/...: one of the files."""
    file = FILES[request.scope["path"]]  # not of its URL, which has the client's Host in it
    headers = {**HEADERS, "ETag": file.etag}
    if request.headers.get("if-none-match") == file.etag:
        return Response(status_code=HTTPStatus.NOT_MODIFIED, headers=headers)
    return Response(file.content, headers=headers, media_type=file.media_type)
