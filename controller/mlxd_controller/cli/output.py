"""The edge of the process: output that cannot be written ends a command with one line.

Invariants:
- A full disk behind stdout, a file or stderr gives no traceback, and never exit code 0.
- Whoever stops reading our output hears nothing more of us: exit code 141.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import TextIO

from mlxd_controller.cli.outcome import ExitCode, complain

_REFUSED = frozenset({
    errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EPIPE, errno.EMFILE, errno.ENFILE,
})  # fmt: skip
"""What the system says where it takes no output, or has no room for an open file."""
_UNUSABLE = frozenset({errno.EIO, errno.EMFILE, errno.ENFILE})
"""Of these, what it says of reading as well."""


def guarded(work: Callable[[], object]) -> None:
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
        if sys.stdout is not None:  # whoever closed it before we began wants no output
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
    verb = "used" if error.errno in _UNUSABLE else "written"
    complain(f"{error.filename or 'the output'} cannot be {verb}: {error.strerror}")
    return ExitCode.ERROR


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _leaves(inner)
    else:
        yield error


def _is_refused(error: BaseException) -> bool:
    return isinstance(error, OSError) and error.errno in _REFUSED


def _let_go(stream: TextIO | None) -> None:
    """Have what is left in a stream that takes nothing go nowhere: the interpreter writes it."""
    if stream is None:
        return
    try:
        stream.flush()
    except (OSError, ValueError):
        with suppress(OSError, ValueError):
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, stream.fileno())
            os.close(null)
