"""`mlxd` on a terminal of its own: what is typed reaches it as from a keyboard, Ctrl-C too."""

from __future__ import annotations

import asyncio
import fcntl
import os
import pty
import signal
import struct
import sys
import termios
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from types import MappingProxyType
from typing import Any

import pyte
from pyte.screens import Char

from tests.support.cli import COMMAND, LIMIT_S, clean_environment

CTRL_C, CTRL_D = "\x03", "\x04"
AGAIN_S = 2.0
"""After how long somebody presses a key again that seems to have done nothing."""
SIGNALLED = 128
"""What shells add to the number of the signal that a command ended by."""
_LEAD = (
    "import fcntl, os, sys, termios\n"
    "fcntl.ioctl(0, termios.TIOCSCTTY, 0)\n"  # so that Ctrl-C is a signal to it
    "os.execv(sys.argv[1], sys.argv[1:])\n"
)


XTERM = "xterm-256color"
SMALL, USUAL = (60, 15), (80, 24)
"""Columns and lines."""


class Terminal:
    """A running command and its screen: what was written, and what is to be seen of it."""

    def __init__(
        self, process: asyncio.subprocess.Process, fd: int, size: tuple[int, int] = USUAL
    ) -> None:
        self.process = process
        self.screen = ""
        self._glass = pyte.Screen(*size)
        self._stream = pyte.ByteStream(self._glass)
        self._fd = fd
        self._shown = asyncio.Event()
        self._seen = 0
        asyncio.get_running_loop().add_reader(fd, self._read)

    def type(self, text: str) -> None:
        """Press these keys."""
        os.write(self._fd, text.encode())

    async def until(self, text: str) -> str:
        """Wait for `text` behind what was waited for before; return what came up to it."""
        async with asyncio.timeout(LIMIT_S):
            while (place := self.screen.find(text, self._seen)) < 0:
                self._shown.clear()
                await self._shown.wait()
        passage = self.screen[self._seen : place]
        self._seen = place + len(text)
        return passage

    @property
    def display(self) -> list[str]:
        """The lines that are to be seen, without trailing blanks."""
        return [line.rstrip() for line in self._glass.display]

    @property
    def cells(self) -> list[list[Char]]:
        """What is to be seen, a line at a time down to the last that has anything, with colours."""
        lines = [
            [self._glass.buffer[y][x] for x in range(self._glass.columns)]
            for y in range(self._glass.lines)
        ]
        while lines and not "".join(cell.data for cell in lines[-1]).strip():
            lines.pop()
        return lines

    @property
    def shown(self) -> str:
        """What is to be seen, as one text."""
        return "\n".join(self.display)

    @property
    def modes(self) -> list[Any]:
        """How the terminal treats what is typed."""
        return termios.tcgetattr(self._fd)[:6]

    async def until_shown(self, text: str | Callable[[str], bool]) -> str:
        """Wait until `text` is to be seen, or what is seen is right; return what is seen."""
        is_right = text if callable(text) else lambda shown: text in shown
        try:
            async with asyncio.timeout(LIMIT_S):
                while not is_right(self.shown):
                    self._shown.clear()
                    await self._shown.wait()
        except TimeoutError:
            raise AssertionError(f"never shown: {text!r}; at last:\n{self.shown}") from None
        return self.shown

    def resize(self, columns: int, lines: int) -> None:
        """Give the terminal another size, of which the command hears as from a window."""
        self._glass.resize(lines, columns)
        set_size(self._fd, (columns, lines))

    async def wait_ended(self) -> int:
        """Wait for the command to end; return its exit code."""
        return await asyncio.wait_for(self.process.wait(), LIMIT_S)

    async def ended_by(self, keys: str) -> int:
        """Press `keys` until the command ends; return its exit code.

        At a prompt, a Ctrl-C that comes between readline's last look at the signals and its wait
        for a key is acted on with the next key only: whoever sits there presses again. Such a
        second one may meet an interpreter that has done all and lets go of its signals: it ends by
        the signal then, for which shells say 130 too.
        """
        ended = asyncio.ensure_future(self.process.wait())
        presses = 0
        async with asyncio.timeout(LIMIT_S):
            while not ended.done():
                self.type(keys)
                presses += 1
                await asyncio.wait([ended], timeout=AGAIN_S)
        is_late = presses > 1 and ended.result() == -signal.SIGINT
        return SIGNALLED + signal.SIGINT if is_late else ended.result()

    def _read(self) -> None:
        try:
            data = os.read(self._fd, 65_536)
        except OSError:  # nobody has the other end any more
            data = b""
        if not data:
            asyncio.get_running_loop().remove_reader(self._fd)
        self._stream.feed(data)
        self.screen += data.decode(errors="replace").replace("\r\n", "\n")
        self._shown.set()


def set_size(fd: int, size: tuple[int, int]) -> None:
    """Give a terminal a size, in columns and lines."""
    columns, lines = size
    fcntl.ioctl(fd, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))


@asynccontextmanager
async def on_terminal(
    *arguments: str,
    term: str = "dumb",
    size: tuple[int, int] = USUAL,
    environment: Mapping[str, str] = MappingProxyType({}),
    stdout: int | None = None,
    stderr: int | None = None,
) -> AsyncIterator[Terminal]:
    """Run `mlxd` with `arguments` around the body; it is ended if the body leaves it running.

    term: what the terminal is said to be. stdout, stderr: where these go instead.
    """
    mine, its = pty.openpty()
    set_size(its, size)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", _LEAD, *COMMAND, *arguments),
        stdin=its,
        stdout=its if stdout is None else stdout,
        stderr=its if stderr is None else stderr,
        start_new_session=True,
        env={**clean_environment(), "TERM": term, **environment},
    )
    os.close(its)
    terminal = Terminal(process, mine, size)
    try:
        yield terminal
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        asyncio.get_running_loop().remove_reader(mine)
        os.close(mine)
