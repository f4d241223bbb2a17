"""The subprocess launcher: failures told apart, output without limits, ends without remains."""

from __future__ import annotations

import asyncio
import os
import signal
import stat
import sys
from pathlib import Path

import psutil
import pytest
from structlog.testing import capture_logs

from mlxd_controller.launcher.environment import own_environment
from mlxd_controller.launcher.output import CUT_MARK, LineCutter, forward
from mlxd_controller.launcher.subprocess import SubprocessLauncher, parse_ready_line
from mlxd_shared import config
from mlxd_shared.domain.errors import (
    BackendProblem,
    WorkerExited,
    WorkerStartFailed,
    WorkerTimedOut,
)
from mlxd_shared.ops.logs import get_logger
from tests.support.launching import fake_command, launch, launcher_of

SHORT_S = 2.0
"""A shell says a word in a hundredth of it."""


def children() -> set[int]:
    """Return the processes that this one has started and not reaped."""
    return {child.pid for child in psutil.Process().children()}


async def failed_launch(script: str, *, stall_timeout_s: float = 60.0) -> WorkerStartFailed:
    """Launch a worker that does not become ready; return why, with nothing left behind."""
    before = children()
    async with launcher_of(fake_command(script), stall_timeout_s=stall_timeout_s) as launcher:
        with pytest.raises(WorkerStartFailed) as caught:
            await launcher.launch(model="m", incarnation="i-1")
    assert children() <= before
    return caught.value


@pytest.mark.asyncio
async def test_an_exit_before_ready_is_told_with_code_and_last_lines() -> None:
    """Exited: the code, and what it said on stdout and stderr."""
    error = await failed_launch("exit")
    assert isinstance(error, WorkerExited)
    assert error.code == 3
    assert sorted(error.last_lines) == ["one", "three", "two"]


@pytest.mark.asyncio
async def test_a_signal_before_ready_is_a_negative_code() -> None:
    """Killed by a signal: the code is the signal's number, negative."""
    error = await failed_launch("killed")
    assert isinstance(error, WorkerExited)
    assert error.code == -signal.SIGKILL
    assert "signal 9" in error.describe()


@pytest.mark.asyncio
async def test_no_news_in_time_is_a_time_out_with_the_last_lines() -> None:
    """Timed out: the process is ended, and what it said is kept."""
    before = children()
    command = ("/bin/sh", "-c", "echo still here; exec sleep 60")
    async with launcher_of(command, stall_timeout_s=SHORT_S) as launcher:
        with pytest.raises(WorkerTimedOut) as caught:
            await launcher.launch(model="m", incarnation="i-1")
    assert caught.value.waited_s == SHORT_S
    assert caught.value.last_lines == ("still here",)
    assert children() <= before


@pytest.mark.asyncio
async def test_a_reason_on_the_ready_pipe_is_told_as_it_is() -> None:
    """A worker that knows why it cannot serve is believed."""
    async with launcher_of(fake_command("refuse")) as launcher:
        with pytest.raises(BackendProblem, match="no backend is installed"):
            await launcher.launch(model="m", incarnation="i-1")


@pytest.mark.asyncio
async def test_gibberish_on_the_ready_pipe_is_a_failed_start() -> None:
    """Neither exited nor timed out: what listens there is no worker."""
    error = await failed_launch("gibberish")
    assert type(error) is WorkerStartFailed


@pytest.mark.asyncio
async def test_a_program_that_is_not_there_is_a_failed_start() -> None:
    """The operating system's reason is among the last lines."""
    async with launcher_of(("/nonexistent/program",)) as launcher:
        with pytest.raises(WorkerStartFailed) as caught:
            await launcher.launch(model="m", incarnation="i-1")
    assert "No such file" in caught.value.last_lines[0]


@pytest.mark.asyncio
async def test_giving_up_ends_and_reaps_the_process() -> None:
    """A caller that is cancelled while the worker starts leaves no process."""
    before = children()
    async with launcher_of(fake_command("hang")) as launcher:
        launching = asyncio.create_task(launcher.launch(model="m", incarnation="i-1"))
        while children() <= before:  # noqa: ASYNC110 - a process's birth is no event
            await asyncio.sleep(0)
        launching.cancel()
        with pytest.raises(asyncio.CancelledError):
            await launching
    assert children() <= before


@pytest.mark.asyncio
async def test_a_start_that_is_given_up_says_nothing_of_it() -> None:
    """Ending a worker that does not listen yet leaves no traceback in the log."""
    command = (sys.executable, "-c", "import signal; print('up', flush=True); signal.pause()")
    with capture_logs() as log:
        async with launcher_of(command) as launcher:
            launching = asyncio.create_task(launcher.launch(model="m", incarnation="i-1"))
            while not any(entry.get("line") == "up" for entry in log):  # noqa: ASYNC110
                await asyncio.sleep(0)
            launching.cancel()
            with pytest.raises(asyncio.CancelledError):
                await launching
    assert [entry["line"] for entry in log if "line" in entry] == ["up"]


@pytest.mark.asyncio
async def test_a_line_of_a_megabyte_neither_blocks_nor_breaks_anything() -> None:
    """No limit on a line: it is cut for keeping, and the next one is whole."""
    async with launch("long-line") as process:
        await process.close()
        lines = process.last_lines()
    assert lines[-1] == "short"
    assert lines[0] == "x" * config.LINE_CHARS_MAX + CUT_MARK


@pytest.mark.asyncio
async def test_a_worker_that_ignores_the_interrupt_is_killed() -> None:
    """Interrupt, the grace, kill, reap: it ends whatever it thinks of that."""
    async with launch("stubborn") as process:
        assert await process.close() == -signal.SIGKILL
    assert not psutil.pid_exists(process.pid)


@pytest.mark.asyncio
async def test_output_held_open_by_another_process_delays_the_end_by_a_grace_only() -> None:
    """A grandchild that inherits the output does not hide the worker's exit."""
    error = await failed_launch("grandchild")
    assert isinstance(error, WorkerExited)
    assert error.code == 3


@pytest.mark.asyncio
async def test_sockets_lie_in_a_private_folder_that_goes_with_the_launcher() -> None:
    """0700, a new address a launch, removed at the end."""
    async with launcher_of(fake_command("serve")) as launcher:
        process = await launcher.launch(model="m", incarnation="i-1")
        folder = Path(process.address.removeprefix("unix:")).parent
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert folder.stat().st_uid == os.getuid()
        await process.close()
    assert not folder.exists()


@pytest.mark.asyncio
async def test_a_worker_that_is_killed_leaves_no_socket_behind() -> None:
    """Its socket is removed when its end is known, long before the folder of all of them is."""
    async with launch("serve") as process:
        socket = Path(process.address.removeprefix("unix:"))
        assert await asyncio.to_thread(socket.is_socket)
        os.kill(process.pid, signal.SIGKILL)
        assert await process.wait_exited() == -signal.SIGKILL
        assert not await asyncio.to_thread(socket.exists)


def test_lines_are_cut_wherever_the_chunks_are() -> None:
    """Characters and lines that are split between chunks come out whole; the tail is flushed."""
    text = "één\r\nzwei\n\nlast"
    for size in (1, 2, 3, 100):
        cutter = LineCutter()
        raw = text.encode()
        lines_read: list[str] = []
        for start in range(0, len(raw), size):
            lines_read += cutter.feed(raw[start : start + size])
        lines_read += cutter.feed(b"", final=True)
        assert lines_read == ["één", "zwei", "", "last"]


WHOLE = b'{"address": "a", "pid": 1, "incarnation": "i", "version": "0"'


@pytest.mark.parametrize(
    "line",
    [
        *(b"", b"[]", b"[" * 60_000, b'{"address": 1}', b"\xff\n", b'{"address": "a"}'),
        *(WHOLE + b', "proof": ' + proof + b"}" for proof in (b'""', b"1", b'"secret"')),
    ],
)
def test_a_ready_line_is_complete_or_refused(line: bytes) -> None:
    """Whatever stands in for a ready line raises; it never becomes half a worker."""
    with pytest.raises(WorkerStartFailed):
        parse_ready_line(line, model="m")


def test_a_worker_may_have_no_proof() -> None:
    """One that does not know of them is a worker all the same."""
    assert parse_ready_line(WHOLE + b"}", model="m").proof is None


@pytest.mark.asyncio
async def test_the_proof_of_another_version_is_not_used() -> None:
    """It may check what this one does not: it is left to do so."""
    async with launch("serve") as process:
        assert process.proof is None


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("device", "seen"),
    [
        ("gpu1", "gpu1 GPU-2a79"),
        ("gpu1+gpu0", "gpu1+gpu0 GPU-2a79,GPU-6bee"),
        ("cpu", "cpu 0,1"),
        ("", " 0,1"),
    ],
)
async def test_a_worker_sees_the_gpu_that_it_is_placed_on_alone(device: str, seen: str) -> None:
    """Its environment names the GPU by the driver's id; without one it is the controller's own."""
    launcher = SubprocessLauncher(
        command=fake_command("device"),
        environment={**own_environment(), "CUDA_VISIBLE_DEVICES": "0,1"},
        gpu_ids={"gpu0": "GPU-6bee", "gpu1": "GPU-2a79", "cpu": ""},
    )
    try:
        process = await launcher.launch(model="m", incarnation="i-1", device=device)
        await process.close()
        assert process.last_lines()[0] == seen
    finally:
        launcher.close()


@pytest.mark.parametrize("line", ["[" * 4000, '{"event": "x", "self": 1, "level": []}', "{"])
def test_whatever_a_worker_prints_can_be_logged(line: str) -> None:
    """A line that breaks the reader would leave the pipe full, and the worker standing."""
    with capture_logs() as lines:
        forward(get_logger("test"), line)
    assert [entry["event"] for entry in lines] in (["worker says"], ["x"])
