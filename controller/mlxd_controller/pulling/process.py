"""The process of one download, as its controller sees it: started, heard, and ended with its task.

However `fetch` ends, its process has ended by then: no file is locked or written any more, and none
is left that nobody would resume.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing

from mlxd_controller.launcher.child import Pipe, PipeReader, start
from mlxd_controller.launcher.output import lines_of
from mlxd_controller.pulling import talk
from mlxd_controller.pulling.leftovers import drop_leftovers
from mlxd_controller.pulling.wanted import Wanted
from mlxd_models.files.model_files import machine_short
from mlxd_shared import config
from mlxd_shared.domain.errors import MlxdError, PullInterrupted
from mlxd_shared.domain.pulls import PulledModel, PullProgress
from mlxd_shared.ops.logs import get_logger

MODULE = "mlxd_controller.pulling"
COMMAND = (sys.executable, "-P", "-m", MODULE)
"""Without the current folder in front of the path, where anybody's modules may lie."""
_SECRETS = re.compile(r"(?<=[\w/.-])\?[^\s'\">]+|\bhf_[A-Za-z0-9]{8,}")
"""What signs a storage's URL, which the hub's library writes whole, and the hub's tokens."""
_log = get_logger("pulling")


async def fetch(
    wanted: Wanted, report: Callable[[PullProgress], None], *, environment: Mapping[str, str]
) -> PulledModel:
    """Download a model in a process of its own, and return what it is; `report` is told each step.

    environment: the process's; it says which hub, and who asks it (HF_ENDPOINT, HF_TOKEN).

    Raises:
        MachineShort: the machine lacks what a process needs.
        MlxdError: as `pulling.hub.pull` does.
    """
    try:
        return await _fetch(wanted, report, environment)
    except OSError as error:
        raise machine_short(error, f"the download of {wanted.name}") or error from error


async def _fetch(
    wanted: Wanted, report: Callable[[PullProgress], None], environment: Mapping[str, str]
) -> PulledModel:
    with ExitStack() as held:
        steps, life, output = (held.enter_context(closing(Pipe(*os.pipe()))) for _ in range(3))
        # Made before the process: nothing may wait between its start and its owner.
        reports, prints = [
            held.enter_context(closing(await pipe.reader())) for pipe in (steps, output)
        ]
        order = (talk.write_order(wanted), str(steps.write_fd), str(life.read_fd))
        child = await start(
            (*COMMAND, *order),
            output=output.write_fd,
            pass_fds=(steps.write_fd, life.read_fd),
            environment=environment,
        )
        logging = asyncio.create_task(_log_output(prints))
        try:
            steps.close(steps.write_fd)
            output.close(output.write_fd)
            if (pulled := await _hear(reports, report)) is not None:
                return pulled
            await asyncio.wait({logging}, timeout=config.EOF_GRACE_S)
            _log.error("a download ended by itself", model=wanted.name, code=await child.wait())
            raise PullInterrupted("the process of the download has ended early; pull again")
        finally:
            logging.cancel()
            child.send_signal(signal.SIGKILL)
            await child.wait()
            await asyncio.to_thread(drop_leftovers, wanted.folder)


async def _hear(reports: PipeReader, report: Callable[[PullProgress], None]) -> PulledModel | None:
    """Return or raise what the process says last; None: it ended without that."""
    async for line in reports.stream:
        match talk.read_line(line):
            case PullProgress() as step:
                report(step)
            case PulledModel() as pulled:
                return pulled
            case MlxdError() as error:
                raise error
    return None


async def _log_output(output: PipeReader) -> None:
    """Write what a process prints, a library's warnings for one, into the log."""
    async for line in lines_of(output.stream):
        _log.info("a download says", line=hide_secrets(line))


def hide_secrets(line: str) -> str:
    """Return a line of the hub's library without what opens its files to whoever reads the log."""
    return _SECRETS.sub("…", line)
