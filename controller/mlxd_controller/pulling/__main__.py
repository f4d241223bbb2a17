"""One download as a process of its own, for a controller: `-m mlxd_controller.pulling`.

What it does takes nothing from the controller's event loop: a library that takes seconds to
import, hashes of gigabytes, and threads of Xet's that only the end of a process is sure to end. It
has low priority, and ends when its controller does. It says each step, and how it ended, in lines
of JSON on a pipe (`talk`).
"""

from __future__ import annotations

import os
import sys
import threading

from mlxd_controller.pulling import talk
from mlxd_controller.pulling.hub import pull
from mlxd_controller.pulling.hub_api import Hub
from mlxd_shared import config
from mlxd_shared.domain.errors import MlxdError
from mlxd_shared.domain.pulls import PullProgress


class Reporter:
    """Writes steps to a pipe: the first and the last of each file and phase, some between."""

    def __init__(self, descriptor: int) -> None:
        self._pipe = os.fdopen(descriptor, "wb")
        self._last: PullProgress | None = None

    def report(self, step: PullProgress) -> None:
        """Write a step, unless hardly more is there than at the last one."""
        last = self._last
        is_new = last is None or (last.phase, last.file) != (step.phase, step.file)
        is_whole = step.file_done_nbytes == step.file_size_nbytes
        grown_nbytes = 0 if last is None else step.done_nbytes - last.done_nbytes
        if is_new or is_whole or grown_nbytes >= config.PULL_REPORT_BYTES:
            self._last = step
            self.say(talk.write_step(step))

    def say(self, line: bytes) -> None:
        """Write a line at once."""
        self._pipe.write(line)
        self._pipe.flush()


def main() -> None:
    """Do what the arguments say: an order, the pipe for reports, and the controller's own."""
    order, reports, life = sys.argv[1:]
    os.nice(config.PULL_NICE)
    threading.Thread(target=_end_with_controller, args=(int(life),), daemon=True).start()
    reporter = Reporter(int(reports))
    try:
        hub = Hub(endpoint=os.environ.get("HF_ENDPOINT") or None)
        last = talk.write_pulled(pull(hub, talk.read_order(order), reporter.report))
    except MlxdError as error:
        last = talk.write_error(error)
    reporter.say(last)


def _end_with_controller(life: int) -> None:
    """End the process when the other end of this pipe is closed."""
    os.read(life, 1)
    os._exit(1)


if __name__ == "__main__":
    main()
