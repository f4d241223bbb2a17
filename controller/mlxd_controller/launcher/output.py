"""A child's output: cut into lines, forwarded to the log and kept."""

from __future__ import annotations

import asyncio
import codecs
import json
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from mlxd_controller.runtime.kept_lines import KeptLines
from mlxd_shared import config
from mlxd_shared.ops.logs import LEVELS

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger

READ_CHUNK_BYTES = 64 * config.KIB
CUT_MARK = " [cut]"


class LineCutter:
    """Splits text into lines, each cut to LINE_CHARS_MAX characters."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._line = ""
        self._cut = False

    def feed(self, chunk: bytes, *, final: bool = False) -> list[str]:
        """Return the lines that `chunk` completes; with `final`, the unfinished one too."""
        *complete, rest = self._decoder.decode(chunk, final).split("\n")
        lines = []
        for piece in complete:
            self._extend(piece)
            lines.append(self._take())
        self._extend(rest)
        if final and self._line:
            lines.append(self._take())
        return lines

    def _extend(self, piece: str) -> None:
        room = config.LINE_CHARS_MAX - len(self._line)
        self._line += piece[:room]
        self._cut = self._cut or len(piece) > room

    def _take(self) -> str:
        line = self._line.rstrip("\r") + (CUT_MARK if self._cut else "")
        self._line, self._cut = "", False
        return line


class Output:
    """Reads one child's output to its end."""

    def __init__(self, log: FilteringBoundLogger, lines: KeptLines) -> None:
        """Write each line to `log`, and keep it in `lines`."""
        self._log = log
        self._lines = lines

    async def follow(self, stream: asyncio.StreamReader) -> None:
        """Forward every line until the stream ends."""
        async for line in lines_of(stream):
            self._lines.add(line)
            forward(self._log, line)


async def lines_of(stream: asyncio.StreamReader) -> AsyncIterator[str]:
    """Yield every line that is not empty until the stream ends, the last one whole or not."""
    cutter = LineCutter()
    while chunk := await stream.read(READ_CHUNK_BYTES):
        for line in filter(None, cutter.feed(chunk)):
            yield line
    for line in filter(None, cutter.feed(b"", final=True)):
        yield line


def forward(log: FilteringBoundLogger, line: str) -> None:
    """Log a line of a child: a structured one with its fields, any other as text."""
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError):  # any text that a library prints
        fields = None
    if not isinstance(fields, dict) or not isinstance(fields.get("event"), str):
        log.info("worker says", line=line)
        return
    level = LEVELS.get(str(fields.pop("level", "")), LEVELS["info"])
    fields.pop("timestamp", None)
    fields.pop("self", None)  # not usable as a keyword for bind
    event: str = fields.pop("event")
    log.bind(**fields).log(level, event)
