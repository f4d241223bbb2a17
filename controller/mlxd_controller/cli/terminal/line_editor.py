"""A chat's terminal: lines in, with editing and several of them as one; answers out as they come.

Nothing that a model writes steers the terminal: of control characters only line ends and tabs pass.
"""

from __future__ import annotations

import contextlib
import sys
from typing import Final

import typer

from mlxd_shared.ops.terminal import without_steering

PROMPT: Final = ">>> "
MORE: Final = "... "
QUOTES: Final = '"""'
GO_ON: Final = "\\"
_DIM: Final = "\x1b[2m"
_PLAIN: Final = "\x1b[0m"


class Interrupted(Exception):
    """Ctrl-C at the prompt, where it means to leave; anywhere else it is a KeyboardInterrupt."""


class LineEditor:
    """Asks for messages. Main thread."""

    def __init__(self) -> None:
        """Enable line editing and history if readline is available."""
        with contextlib.suppress(ImportError):  # not on every system; then lines come as typed
            import readline  # noqa: F401, PLC0415 - `input` uses it once it is imported

    def message(self) -> str | None:
        """Return the next message, maybe of several lines; None where the input has ended.

        A backslash at its end continues a line; three quotes begin and end several lines.

        Raises:
            Interrupted: Ctrl-C at the prompt.
        """
        try:
            return self._message()
        except EOFError:
            typer.echo()
            return None

    def _message(self) -> str:
        line = self._line(PROMPT)
        if line.lstrip().startswith(QUOTES):
            return self._read_quoted(line.lstrip().removeprefix(QUOTES))
        lines = []
        while line.endswith(GO_ON):
            lines.append(line.removesuffix(GO_ON))
            line = self._line(MORE)
        return "\n".join([*lines, line])

    def _read_quoted(self, line: str) -> str:
        lines = []
        while not line.rstrip().endswith(QUOTES):
            lines.append(line)
            line = self._line(MORE)
        return "\n".join([*lines, line.rstrip().removesuffix(QUOTES)]).strip("\n")

    def _line(self, prompt: str) -> str:
        if not sys.stdout.isatty():
            typer.echo(prompt, nl=False, err=True)  # what is written to stdout is the answers'
            prompt = ""
        try:
            return input(prompt)
        except KeyboardInterrupt:
            raise Interrupted from None


class AnswerWriter:
    """Writes one answer; reasoning is dimmed, and omitted if the output is not a terminal."""

    def __init__(self) -> None:
        self._watched = sys.stdout.isatty()
        self._thinking = False
        self._last = "\n"

    def text(self, text: str) -> None:
        """Write text of the answer."""
        if self._thinking:
            self._thinking = False
            self._write(f"{_PLAIN}\n" if self._last == "\n" else f"{_PLAIN}\n\n", steering=True)
        self._write(text)

    def reasoning(self, text: str) -> None:
        """Write reasoning."""
        if not self._watched:
            return
        if not self._thinking:
            self._thinking = True
            self._write(_DIM, steering=True)
        self._write(text)

    def end(self) -> None:
        """End the current line."""
        if self._thinking:
            self._thinking = False
            self._write(_PLAIN, steering=True)
        if self._last != "\n":
            typer.echo()
        self._last = "\n"

    def _write(self, text: str, *, steering: bool = False) -> None:
        if self._watched and not steering:
            text = without_steering(text)
        if text:
            typer.echo(text, nl=False)
            self._last = text[-1] if not steering or "\n" in text else self._last
