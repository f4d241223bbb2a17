"""Answers on a terminal, as they come.

Nothing that a model writes steers the terminal: of control characters only line ends and tabs pass.
"""

from __future__ import annotations

import os
import shutil
import sys
from typing import Final

import typer

from mlxd_controller.cli.terminal.wrapping import Wrapping
from mlxd_shared.ops.terminal import without_steering

_DIM: Final = "\x1b[2m"
_PLAIN: Final = "\x1b[0m"


class AnswerWriter:
    """Writes one answer; reasoning is dimmed, and omitted if the output is not a terminal."""

    def __init__(self, *, wrap: bool = True) -> None:
        """Write to stdout; wrap: on a terminal lines are broken between words."""
        self._watched = sys.stdout.isatty()
        draws = self._watched and os.environ.get("TERM") != "dumb"
        width = shutil.get_terminal_size().columns if draws and wrap else 0
        self._wrapping = Wrapping(width)
        self._thinking = False
        self._last = "\n"

    def text(self, text: str) -> None:
        """Write text of the answer."""
        if self._thinking:
            self._thinking = False
            self._flush()
            self._write(f"{_PLAIN}\n" if self._last == "\n" else f"{_PLAIN}\n\n", steering=True)
        self._write(text)

    def reasoning(self, text: str) -> None:
        """Write reasoning."""
        if not self._watched:
            return
        if not self._thinking:
            self._thinking = True
            self._flush()
            self._write(_DIM, steering=True)
        self._write(text)

    def end(self) -> None:
        """End the current line."""
        self._flush()
        if self._thinking:
            self._thinking = False
            self._write(_PLAIN, steering=True)
        if self._last != "\n":
            typer.echo()
        self._last = "\n"

    def _flush(self) -> None:
        self._write(self._wrapping.end(), steering=True)

    def _write(self, text: str, *, steering: bool = False) -> None:
        if self._watched and not steering:
            text = self._wrapping.add(without_steering(text))
        if text:
            typer.echo(text, nl=False)
            self._last = text[-1] if not text.startswith("\x1b") or "\n" in text else self._last
