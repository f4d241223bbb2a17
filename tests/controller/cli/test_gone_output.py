"""Output without a reader, and streams that were closed before the command began."""

from __future__ import annotations

import asyncio
import errno
import os
from pathlib import Path

import pytest

from mlxd_controller.cli.output import run_guarded
from tests.fakes import replies
from tests.fakes.mlxd_server import Answers, serving
from tests.support.cli import COMMAND, LIMIT_S, clean_environment, start

SERVE = ("serve", "--address", "127.0.0.1:0", "--log-format", "json")
READER_GONE = 141
"""128 + SIGPIPE, as a shell says it of other programs."""


async def without_reader(*arguments: str) -> tuple[int | None, str]:
    """Run `mlxd` into a pipe whose reader is gone; return its exit code and its stderr."""
    reading, writing = os.pipe()
    os.close(reading)
    process = await start(*arguments, stdout=writing)
    os.close(writing)
    _, err = await asyncio.wait_for(process.communicate(), LIMIT_S)
    return process.returncode, err.decode()


async def with_closed(streams: str, *arguments: str) -> tuple[int | None, str, str]:
    """Run `mlxd` with some of its streams closed, as a shell writes it: `>&-`."""
    process = await asyncio.create_subprocess_exec(
        *("sh", "-c", f'exec "$@" {streams}', "sh", *COMMAND, *arguments),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=clean_environment(),
    )
    out, err = await asyncio.wait_for(process.communicate(), LIMIT_S)
    return process.returncode, out.decode(), err.decode()


@pytest.mark.asyncio
@pytest.mark.parametrize("arguments", ["version", "--version", "--help", "protos", "ps --help"])
async def test_what_needs_no_server_ends_as_the_pipe_does(arguments: str, tmp_path: Path) -> None:
    """`mlxd version | true` says nothing, and its exit code says why."""
    out = ("--out", str(tmp_path)) if arguments == "protos" else ()

    assert await without_reader(*arguments.split(), *out) == (READER_GONE, "")


@pytest.mark.asyncio
async def test_what_asks_a_server_ends_as_the_pipe_does() -> None:
    """So do the ordinary commands, in tables and in JSON."""
    async with serving(Answers(statuses=[replies.status()])) as fake:
        for arguments in ("models", "ps --json", "status", "health"):
            ended = await without_reader("--address", fake.address, *arguments.split())

            assert ended == (READER_GONE, ""), arguments


@pytest.mark.asyncio
async def test_a_server_whose_starter_has_gone_ends_as_the_pipe_does() -> None:
    """Nobody reads where it listens; its log is all that it says."""
    code, err = await without_reader(*SERVE)

    assert code == READER_GONE
    assert "Traceback" not in err


@pytest.mark.asyncio
@pytest.mark.parametrize("streams", [">&-", "2>&-", ">&- 2>&-", "<&- >&- 2>&-"])
async def test_closed_streams_hear_nothing_and_fail_nothing(streams: str) -> None:
    """Whoever closed a stream before the command began wants nothing of it: the work is done."""
    async with serving(Answers(generate=replies.story())) as fake:
        for arguments in ("ps", "ps --json", "health", "generate demo x"):
            code, out, err = await with_closed(
                streams, "--address", fake.address, *arguments.split()
            )

            assert (code, err) == (0, ""), (arguments, err)
            assert (out == "") == (">&-" in streams.split()), arguments


@pytest.mark.asyncio
async def test_a_command_without_streams_keeps_its_exit_code() -> None:
    """It says nothing of a server that does not answer, but that it failed."""
    for streams in (">&- 2>&-", "2>&-"):
        assert await with_closed(streams, "--address", "unix:/none", "ps") == (4, "", "")


@pytest.mark.asyncio
async def test_a_closed_standard_input_is_an_empty_one() -> None:
    """A prompt that nobody types is asked for nowhere: as from /dev/null."""
    async with serving(Answers(generate=replies.story())) as fake:
        empty = await with_closed("</dev/null", "--address", fake.address, "generate", "m")
        closed = await with_closed("<&-", "--address", fake.address, "generate", "m")

    assert closed == empty


NULL = (
    "import os; from mlxd_controller.cli import open_closed; open_closed();"
    "assert all(os.path.samestat(os.fstat(n), os.stat(os.devnull)) for n in (0, 1))"
)


@pytest.mark.asyncio
async def test_no_file_takes_the_number_of_a_closed_stream() -> None:
    """What a library writes to descriptor 1 would go into a socket of ours."""
    process = await asyncio.create_subprocess_exec(
        *("sh", "-c", 'exec "$@" <&- >&-', "sh", COMMAND[0], "-c", NULL),
        stderr=asyncio.subprocess.PIPE,
    )
    _, err = await asyncio.wait_for(process.communicate(), LIMIT_S)

    assert (process.returncode, err) == (0, b"")


@pytest.mark.parametrize(
    ("number", "name", "said"),
    [
        (errno.ENOSPC, "notes", "notes cannot be written: No space left on device"),
        (errno.ENOSPC, None, "the output cannot be written: No space left on device"),
        (errno.EIO, "notes", "notes cannot be used: Input/output error"),
        (errno.EMFILE, "notes", "notes cannot be opened: Too many open files"),
        (errno.EMFILE, None, "no file can be opened: Too many open files"),
        (errno.ENFILE, None, "no file can be opened: Too many open files in system"),
    ],
)
def test_the_message_says_what_cannot_be_done(
    number: int, name: str | None, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file for which no descriptor is left was not written to: it could not be opened."""

    def fail() -> None:
        raise OSError(number, os.strerror(number), name)

    with pytest.raises(SystemExit) as ended:
        run_guarded(fail)

    assert ended.value.code == 1
    assert capsys.readouterr().err == f"mlxd: {said}\n"
