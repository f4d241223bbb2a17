"""What a user of a chat types: messages with line editing and a history, and answers to questions.

Invariants:
- Lines that are pasted are one message. Ctrl-C clears what is typed; with nothing typed it leaves.
- The prompt is drawn on whichever of stdout and stderr is a terminal: with stdout in a file, that
  has answers alone.
- However the prompt is left, by a signal too, the terminal is as it was before.
- Answers to questions are not in the history: what a tool returns may be anybody's.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

import typer

from mlxd_controller.cli.outcome import complain
from mlxd_controller.cli.terminal.ending import ENDING_SIGNALS, end_by
from mlxd_shared.ops.signals import handling

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession

PROMPT: Final = ">>> "
MORE: Final = "... "
QUOTES: Final = '"""'
GO_ON: Final = "\\"


class Interrupted(Exception):
    """Ctrl-C at the prompt, where it means to leave; anywhere else it is a KeyboardInterrupt."""


class _Ended(Exception):
    """A signal that ends the process has come, while the terminal is the prompt's."""

    def __init__(self, number: int) -> None:
        self.number = number
        super().__init__(number)


class Lines(Protocol):
    """Where lines come from: the keys of a terminal, or one that nobody sees."""

    def read(self, prompt: str, *, keeps: bool = True) -> str:
        """Return what is typed at a prompt, maybe several lines that were pasted.

        keeps: whether it is for the history.

        Raises:
            EOFError: the input has ended.
            Interrupted: Ctrl-C, with nothing typed.
        """
        ...


class PlainLines:
    """Lines as the terminal itself edits them, for one that draws nothing (TERM=dumb).

    Nobody knows what is typed there before the line is whole, so Ctrl-C always leaves.
    """

    def read(self, prompt: str, *, keeps: bool = True) -> str:  # noqa: ARG002 - there is no history
        """Return a line; see `Lines`."""
        aside = not sys.stdout.isatty()  # what is written to stdout is the answers' then
        typer.echo(prompt, nl=False, err=aside)
        try:
            return input()
        except KeyboardInterrupt:
            typer.echo(err=aside)
            raise Interrupted from None
        except EOFError:
            typer.echo(err=aside)
            raise


class EditedLines:
    """Lines edited by prompt_toolkit, on the event loop of `run`. Main thread."""

    def __init__(
        self, run: Callable[[Coroutine[Any, Any, str]], str], history: Path | None
    ) -> None:
        """Edit with `run`; history: where entries are kept, None for nowhere."""
        # Imported here: of all commands a chat alone needs it, and it takes long.
        from prompt_toolkit import PromptSession  # noqa: PLC0415
        from prompt_toolkit.history import DummyHistory, InMemoryHistory  # noqa: PLC0415

        from mlxd_controller.cli.chat.history import HistoryFile  # noqa: PLC0415

        kept = InMemoryHistory() if history is None else HistoryFile(history, on_problem=complain)
        self._run = run
        keys, output = _make_keys(), _make_output()
        self._messages: PromptSession[str] = PromptSession(
            history=kept, key_bindings=keys, output=output
        )
        self._answers: PromptSession[str] = PromptSession(
            history=DummyHistory(), key_bindings=keys, output=output
        )

    def read(self, prompt: str, *, keeps: bool = True) -> str:
        """Return what is typed; see `Lines`."""
        try:
            return self._run(_edit(self._messages if keeps else self._answers, prompt))
        except _Ended as ended:
            end_by(ended.number)
            raise


async def _edit(session: PromptSession[str], prompt: str) -> str:
    """Return what is typed.

    Raises:
        _Ended: a signal came.
    """

    def end(number: int) -> None:
        if not session.app.is_running:
            end_by(number)
        elif not session.app.is_done:
            session.app.exit(exception=_Ended(number))

    with handling(end, *ENDING_SIGNALS):
        return await session.prompt_async(prompt, prompt_continuation=MORE)


def _make_output() -> Any:  # noqa: ANN401 - prompt_toolkit's own
    """Return where the prompt is drawn."""
    from prompt_toolkit.output import create_output  # noqa: PLC0415
    from prompt_toolkit.output.vt100 import Vt100_Output  # noqa: PLC0415

    output = create_output(always_prefer_tty=True)
    if isinstance(output, Vt100_Output):
        # The answer to the question where the cursor is would be read as typed by whoever types
        # ahead, and a terminal that gives none would be complained of.
        output.enable_cpr = False
    return output


def _make_keys() -> Any:  # noqa: ANN401 - prompt_toolkit's own
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent  # noqa: PLC0415

    keys = KeyBindings()

    @keys.add("c-c")
    @keys.add("<sigint>")
    def clear_or_leave(event: KeyPressEvent) -> None:
        if event.current_buffer.text:
            event.current_buffer.reset()
        else:
            event.app.exit(exception=Interrupted())

    @keys.add("escape", "enter")
    def break_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return keys


def open_lines(run: Callable[[Coroutine[Any, Any, str]], str], history: Path | None) -> Lines:
    """Return the best way to read lines here; see `EditedLines` for the arguments."""
    is_dumb = os.environ.get("TERM", "").lower() in {"", "dumb", "unknown"}
    can_draw = not is_dumb and (sys.stdout.isatty() or sys.stderr.isatty())
    return EditedLines(run, history) if can_draw else PlainLines()


class Editor:
    """Asks for messages and for answers to questions. Main thread."""

    def __init__(self, lines: Lines) -> None:
        self._lines = lines

    def message(self) -> str | None:
        """Return the next message, maybe of several lines; None where the input has ended.

        A backslash at its end continues a line; three quotes begin and end several lines.

        Raises:
            Interrupted: Ctrl-C at the prompt.
        """
        try:
            return self._message()
        except EOFError:
            return None

    def ask(self, question: str) -> str:
        """Return the answer to a question, as one text; empty where the input has ended.

        Raises:
            Interrupted: Ctrl-C at the question.
        """
        try:
            return self._lines.read(question, keeps=False).strip()
        except EOFError:
            return ""

    def _message(self) -> str:
        line = self._lines.read(PROMPT)
        if line.lstrip().startswith(QUOTES):
            return self._read_quoted(line.lstrip().removeprefix(QUOTES))
        lines = []
        while line.endswith(GO_ON):
            lines.append(line.removesuffix(GO_ON))
            line = self._lines.read(MORE)
        return "\n".join([*lines, line])

    def _read_quoted(self, line: str) -> str:
        lines = []
        while not line.rstrip().endswith(QUOTES):
            lines.append(line)
            line = self._lines.read(MORE)
        return "\n".join([*lines, line.rstrip().removesuffix(QUOTES)]).strip("\n")
