"""The terminal while `mlxd top` has it: keys one by one, another screen, and back as it was.

Invariants:
- However the block is left, by an error and a signal too, the terminal is as it was before.
- Ctrl-C stays a signal. Ctrl-Z is none: a stopped process could not give the terminal back.
"""

from __future__ import annotations

import asyncio
import os
import sys
import termios
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

READ_BYTES = 1024
Show = Callable[[list[Text]], None]


@contextmanager
def full_screen(console: Console) -> Iterator[Show]:
    """Show frames on the terminal's other screen while the block lasts."""
    live = Live(
        console=console, screen=True, auto_refresh=False, redirect_stdout=False,
        redirect_stderr=False, vertical_overflow="crop",
    )  # fmt: skip

    def show(lines: list[Text]) -> None:
        for line in lines:
            line.no_wrap, line.overflow = True, "crop"
        live.update(Group(*lines), refresh=True)

    with live:
        yield show


@contextmanager
def keys_at_once(on_keys: Callable[[str], None], on_gone: Callable[[], None]) -> Iterator[None]:
    """Call `on_keys` with what is typed, unseen, as it is typed; `on_gone` if nobody can any more.

    Needs a running event loop, and a terminal as standard input.
    """
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    loop = asyncio.get_running_loop()

    def read() -> None:
        try:
            data = os.read(descriptor, READ_BYTES)
        except OSError:
            data = b""
        if data:
            on_keys(data.decode(errors="replace"))
        else:
            loop.remove_reader(descriptor)
            on_gone()

    try:
        tty.setcbreak(descriptor, termios.TCSANOW)
        during = termios.tcgetattr(descriptor)
        during[6][termios.VSUSP] = os.fpathconf(descriptor, "PC_VDISABLE").to_bytes(1, "little")
        termios.tcsetattr(descriptor, termios.TCSANOW, during)
        loop.add_reader(descriptor, read)
        yield
    finally:
        loop.remove_reader(descriptor)
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
