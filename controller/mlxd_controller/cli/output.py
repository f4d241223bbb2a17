"""The edge of the process: output that cannot be written ends a command with one line.

Invariants:
- A full disk behind stdout, a file or stderr gives no traceback, and never exit code 0.
- If the reader closes our output, the process ends silently with exit code 141.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO

import typer
from typer.core import TyperGroup

from mlxd_controller.cli import take_interrupts
from mlxd_controller.cli.outcome import ExitCode, complain

_REFUSED = frozenset({
    errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EPIPE, errno.EMFILE, errno.ENFILE,
})  # fmt: skip
"""What the system says where it takes no output, or has no room for an open file."""
_NO_DESCRIPTOR = frozenset({errno.EMFILE, errno.ENFILE})
"""Of these, what it says before anything is read or written."""


class Commands(TyperGroup):
    """Commands that leave with 141 or 130 where typer, which looks itself, would with 1.

    The types are click's, which some versions of typer have for a module of their own.
    """

    def make_context(self, *arguments: Any, **options: Any) -> Any:  # noqa: ANN401
        """Read the command line; `--help` and `--version` are printed while it is."""
        with _leaving_in_good_order():
            return super().make_context(*arguments, **options)

    def resolve_command(self, *arguments: Any) -> Any:  # noqa: ANN401
        """Look the command up, which imports it."""
        resolved = super().resolve_command(*arguments)
        take_interrupts()
        return resolved

    def invoke(self, ctx: Any) -> Any:  # noqa: ANN401
        """Run the command."""
        with _leaving_in_good_order():
            return super().invoke(ctx)


@contextmanager
def _leaving_in_good_order() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError as error:
        raise typer.Exit(ExitCode.PIPE) from error
    except KeyboardInterrupt as interrupt:  # a command that asks a server has its own way
        raise typer.Exit(ExitCode.INTERRUPTED) from interrupt


def run_guarded(work: Callable[[], object]) -> None:
    """Run `work`, which ends the process; end it in good order where output cannot be written.

    Raises:
        SystemExit: at its end.
    """
    code: object = ExitCode.OK
    try:
        work()
    except SystemExit as leaving:
        code = leaving.code
    except (OSError, BaseExceptionGroup) as error:
        refused = [leaf for leaf in _leaves(error) if _is_refused(leaf)]
        if len(refused) < len(list(_leaves(error))):
            raise  # a bug
        code = _tell(refused[0])
    try:
        sys.stdout.flush()
    except OSError as error:
        code = _tell(error) if code in (None, ExitCode.OK) else code
    _let_go(sys.stdout)
    _let_go(sys.stderr)
    raise SystemExit(code)


def _tell(error: BaseException) -> ExitCode:
    assert isinstance(error, OSError)
    if isinstance(error, BrokenPipeError):
        return ExitCode.PIPE
    complain(f"{_problem(error)}: {error.strerror}")
    return ExitCode.ERROR


def _problem(error: OSError) -> str:
    if error.errno in _NO_DESCRIPTOR:
        return f"{error.filename} cannot be opened" if error.filename else "no file can be opened"
    verb = "used" if error.errno == errno.EIO else "written"  # EIO comes of reading as well
    return f"{error.filename or 'the output'} cannot be {verb}"


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _leaves(inner)
    else:
        yield error


def _is_refused(error: BaseException) -> bool:
    return isinstance(error, OSError) and error.errno in _REFUSED


def _let_go(stream: TextIO) -> None:
    """Have what is left in a stream that takes nothing go nowhere: the interpreter writes it."""
    try:
        stream.flush()
    except (OSError, ValueError):
        with suppress(OSError, ValueError):
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, stream.fileno())
            os.close(null)
