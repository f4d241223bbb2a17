"""The end of a command: one event loop, one line on stderr, one exit code (see the package)."""

from __future__ import annotations

import asyncio
import enum
import os
import sys
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

import grpc
import typer

from mlxd_shared.domain import errors as e
from mlxd_shared.ops.terminal import escape
from mlxd_shared.wire.status import RemoteError

NO_FLAGS: Mapping[str, str] = MappingProxyType({})
_NOBODY = ("Connection refused", "No such file or directory")
"""The system's words in gRPC's message where nobody has the port or the socket."""
_HUNG_UP = ("Socket closed", "Connection reset")
"""Its words where somebody has, and ends the connection at once."""
_PARAMETERS = {
    "choices": "choice",
    "continuations": "continuation",
    "depth_max": "speculate",
    "ebnf_grammar": "grammar",
    "parse_special_tokens": "special",
    "pinned": "pin",
    "prefix_cache_bytes": "prefix_cache",
    "rows_max": "rows",
    "stop_token_ids": "stop_token_id",
    "template_variables_json": "variable",
    "top_logprobs": "logprobs",
}
"""Of fields that a command's parameters have another name than."""


class ExitCode(enum.IntEnum):
    """The exit code of a process."""

    OK = 0
    ERROR = 1
    USAGE = 2
    NOT_FOUND = 3
    UNREACHABLE = 4
    NO_FIT = 5
    INTERRUPTED = 130
    PIPE = 141


def run(
    work: Coroutine[Any, Any, ExitCode | None],
    *,
    address: str,
    flags: Mapping[str, str] = NO_FLAGS,
    loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None,
) -> NoReturn:
    """Run `work` to its end and leave with its exit code, None being OK, or its error's.

    `address` is the server's, for the message when nobody answers; `flags` as `describe` has them.

    Ctrl-C cancels `work`, which ends its calls on the way out. Output that cannot be written is for
    `mlxd_controller.cli.output` to tell of.

    Raises:
        typer.Exit: at its end.
        OSError: the output cannot be written.
    """
    try:
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            code = runner.run(work) or ExitCode.OK
        sys.stdout.flush()
    except e.MlxdError as error:
        code = report(error, address, flags)
    except ExceptionGroup as group:
        code = report(_only_expected(group), address, flags)
    except KeyboardInterrupt:
        code = ExitCode.INTERRUPTED
    raise typer.Exit(code)


def _only_expected(group: ExceptionGroup[Exception]) -> e.MlxdError:
    """Return the error of tasks that failed together, or raise `group` if one of them is a bug."""
    expected, bugs = group.split(e.MlxdError)
    if bugs is not None or expected is None:
        raise group
    first: BaseException = expected
    while isinstance(first, BaseExceptionGroup):
        first = first.exceptions[0]
    assert isinstance(first, e.MlxdError)
    return first


def report(error: e.MlxdError, address: str, flags: Mapping[str, str] = NO_FLAGS) -> ExitCode:
    """Print an error on stderr; return its exit code. `flags` as `describe` has them."""
    if isinstance(error, RemoteError) and is_unreachable(error):
        complain(_unreachable(address, error.message))
    elif isinstance(error, RemoteError) and error.code is grpc.StatusCode.UNAUTHENTICATED:
        complain(f"{error.message} by the server at {address}: see --token-file")
    else:
        complain(describe(error, flags))
    return exit_code_of(error)


def describe(error: e.MlxdError, flags: Mapping[str, str]) -> str:
    """Return what is wrong, by the flag that was given rather than the field that it set.

    flags: what the command was given, by parameter, see `options.given_flags`.
    """
    if not isinstance(error, e.InvalidRequest):
        return error.describe()
    said = (replace(v, field=_name_flag(v.field, flags)) for v in error.violations)
    return e.InvalidRequest(tuple(said)).describe()


def _name_flag(field: str, flags: Mapping[str, str]) -> str:
    """Return the flag that set a field, such as options.sampling.top_p; the field if none did."""
    name = field.rpartition(".")[2].partition("[")[0]
    return flags.get(_PARAMETERS.get(name, name), field)


def complain(problem: str) -> None:
    """Write one line to stderr; if that fails, only the exit code tells."""
    say(f"mlxd: {' '.join(problem.split())}")


def say(text: str) -> None:
    """Write lines to stderr, on a terminal broken between words, as `complain` does."""
    text = escape(text)
    if sys.stderr.isatty() and os.environ.get("TERM") != "dumb":
        from textwrap import wrap  # noqa: PLC0415 - for people alone

        width = max(os.get_terminal_size(sys.stderr.fileno()).columns, 1)
        lines = (
            wrap(line, width, break_long_words=False, break_on_hyphens=False) or [""]
            for line in text.splitlines()
        )
        text = "\n".join(line for each in lines for line in each)
    with suppress(OSError):
        typer.echo(text, err=True)


def leave(problem: str, code: ExitCode) -> NoReturn:
    """Write one line to stderr, and end the command by raising typer.Exit."""
    complain(problem)
    raise typer.Exit(code)


def usage_error(problem: str) -> NoReturn:
    """Refuse the command line by raising typer.Exit."""
    leave(problem, ExitCode.USAGE)


def read_piped() -> str:
    """Return the text of the standard input.

    Raises:
        typer.Exit: it is not UTF-8 text.
    """
    try:
        return sys.stdin.read()
    except UnicodeDecodeError:
        usage_error("the standard input is not UTF-8 text")


def read_lines(problem: str) -> list[str]:
    """Return the lines of the standard input, one at least.

    problem: what is missing where there are none.

    Raises:
        typer.Exit: there are none, or they are not UTF-8 text.
    """
    if sys.stdin.isatty():
        usage_error(f"{problem}: give it as an argument, or pipe in lines")
    lines = read_piped().split("\n")
    if not lines[-1]:  # behind the last newline
        lines.pop()
    if not lines:
        usage_error(f"{problem}: the standard input is empty")
    return lines


def exit_code_of(error: e.MlxdError) -> ExitCode:
    """Return the exit code of an error."""
    if is_unreachable(error):
        return ExitCode.UNREACHABLE
    match error:
        case e.HubUnavailable():
            return ExitCode.UNREACHABLE
        case e.InvalidRequest() | e.FieldNotServed() | e.BadCredentials():
            return ExitCode.USAGE
        case e.ModelNotFound():
            return ExitCode.NOT_FOUND
        case e.ModelTooLarge() | e.NoRoom():
            return ExitCode.NO_FIT
        case _:
            return ExitCode.ERROR


def is_unreachable(error: e.MlxdError) -> bool:
    """Return whether no server answered: our own servers send UNAVAILABLE with a reason."""
    return isinstance(error, RemoteError) and error.code is grpc.StatusCode.UNAVAILABLE


def nobody_listens(error: e.MlxdError) -> bool:
    """Return whether no server is there, not one that hangs up, or goes while it is asked."""
    message = error.message if isinstance(error, RemoteError) else ""
    return is_unreachable(error) and any(word in message for word in _NOBODY)


def _unreachable(address: str, message: str) -> str:
    """Return what to do; `message` is gRPC's, in whose words alone TLS troubles show."""
    if "handshake failed" in message:
        return (
            f"no TLS with what listens at {address}: it serves without TLS (then leave --tls-ca"
            " out), or others than --tls-ca signed its certificate"
        )
    if "failed to connect" in message and any(word in message for word in _HUNG_UP):
        return (
            f"what listens at {address} hangs up: a server with TLS needs --tls-ca, and --tls-cert"
            " where it asks for one"
        )
    return f"no server answers at {address}; start one with `mlxd serve`, or see --address"


def model_argument(text: str) -> str:
    """Return a model's name as it is, a path as an absolute one: the server lives elsewhere.

    A path begins with `/`, `./`, `../` or `~`, or holds a separator and names a folder here.
    """
    path = Path(text).expanduser()
    first = Path(text).parts[:1]
    explicit = text.startswith(("~", "./", "../", "/")) or text in {".", ".."}
    if explicit or (len(path.parts) > len(first) and path.is_dir()):
        return str(path.absolute())
    return text
