"""The last lines of a worker's output: bounded, numbered, awaited by readers that follow them.

There is one writer, which no reader can block. Lines are numbered from 0; a reader that falls
behind learns how many it has missed.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass
from itertools import islice

from mlxd_shared import config


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of lines; `end` is the number after the last of them."""

    lines: tuple[str, ...]
    end: int
    missed: int
    """How many lines before the first one were dropped before they could be read."""


class KeptLines:
    """At most LINES_KEPT_MAX lines, of at most LINES_KEPT_BYTES_MAX in total."""

    def __init__(self) -> None:
        self._lines: deque[str] = deque()
        self._nbytes = 0
        self._end = 0
        self._is_over = False
        self._news = asyncio.Event()

    @property
    def end(self) -> int:
        """The number of the line that comes next."""
        return self._end

    @property
    def begin(self) -> int:
        """The number of the oldest line that is kept."""
        return self._end - len(self._lines)

    def add(self, line: str) -> None:
        """Keep a line, and drop the oldest ones that no longer fit."""
        self._lines.append(line)
        self._nbytes += len(line.encode())
        self._end += 1
        lines_max, nbytes_max = config.LINES_KEPT_MAX, config.LINES_KEPT_BYTES_MAX
        while len(self._lines) > lines_max or self._nbytes > nbytes_max:
            self._nbytes -= len(self._lines.popleft().encode())
        self._pulse()

    def close(self) -> None:
        """Note that no line follows."""
        self._is_over = True
        self._pulse()

    def last(self, count: int) -> tuple[str, ...]:
        """Return the last lines, `count` at most, oldest first."""
        return tuple(islice(self._lines, max(len(self._lines) - count, 0), None))

    def read(self, begin: int, *, end: int, nbytes_max: int) -> Piece:
        """Return lines from `begin` on, before `end`; at least one if there is one."""
        first = max(begin, self.begin)
        lines: list[str] = []
        nbytes = 0
        for line in islice(self._lines, first - self.begin, max(end - self.begin, 0)):
            nbytes += len(line.encode())
            if lines and nbytes > nbytes_max:
                break
            lines.append(line)
        return Piece(tuple(lines), first + len(lines), missed=first - begin)

    async def wait(self, number: int) -> bool:
        """Wait for the line of this number; return False if there will be none."""
        while self._end <= number and not self._is_over:
            await self._news.wait()
        return self._end > number

    def _pulse(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()
