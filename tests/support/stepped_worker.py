"""A worker, real but for one thing: each of its steps waits for a byte in a pipe.

So a test counts steps: it gives out as many as it likes, and `steps_taken` tells how many are over.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from mlxd_shared.domain.devices import DeviceKind
from mlxd_shared.ops import logs
from mlxd_worker.__main__ import run
from mlxd_worker.process.options import parse_options

if TYPE_CHECKING:
    from mlxd_worker.thread.host import ModelHost

PIPE_VARIABLE = "TEST_STEPS_PIPE"
"""Names the pipe in the file system, in the worker's environment."""
OVER = "a step is over"
_log = logs.get_logger("steps")


def steps_taken(log: str) -> int:
    """Return how many steps a worker with this log has done."""
    return log.count(OVER)


def make_stepped_host(kind: DeviceKind) -> ModelHost:
    """Return a host whose steps are given out one by one; imports MLX."""
    from mlxd_worker.thread.host import ModelHost  # noqa: PLC0415 - after the BLAS, on its thread

    class SteppedHost(ModelHost):
        """Steps when it may."""

        pipe = os.open(os.environ[PIPE_VARIABLE], os.O_RDWR)  # so that it never ends

        def step(self) -> None:
            """Wait for a byte, then step."""
            assert os.read(self.pipe, 1)
            super().step()
            _log.info(OVER)

    return SteppedHost(device=kind)


def main() -> None:
    """Run it with the worker's own command line."""
    options = parse_options()
    logs.configure(level=options.log_level, fmt=options.log_format)
    sys.exit(run(options, make_host=make_stepped_host))


if __name__ == "__main__":
    main()
