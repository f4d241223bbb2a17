"""A worker, real but for one thing: each of its steps waits until nobody locks a file.

So a test makes a step as long as it likes, and knows that it is not over before it lets go. The
log tells of each step that had to wait (`HELD`).
"""

from __future__ import annotations

import fcntl
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from mlxd_shared.domain.devices import DeviceKind
from mlxd_shared.ops import logs
from mlxd_worker.__main__ import run
from mlxd_worker.process.options import parse_options

if TYPE_CHECKING:
    from mlxd_worker.thread.host import ModelHost

LOCK_VARIABLE = "TEST_STEP_LOCK"
"""Names the file, in the worker's environment."""
HELD = "a step is held"
_log = logs.get_logger("steps")


@contextmanager
def steps_held(path: Path) -> Iterator[None]:
    """Let no step go on during the body."""
    with path.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def make_held_host(kind: DeviceKind) -> ModelHost:
    """Return a host whose steps can be held; imports MLX."""
    from mlxd_worker.thread.host import ModelHost  # noqa: PLC0415 - after the BLAS, on its thread

    class HeldHost(ModelHost):
        """Steps when it may."""

        def step(self) -> None:
            """Wait, then step."""
            with Path(os.environ[LOCK_VARIABLE]).open("rb") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except BlockingIOError:
                    _log.info(HELD)
                    fcntl.flock(file, fcntl.LOCK_SH)
            super().step()

    return HeldHost(device=kind)


def main() -> None:
    """Run it with the worker's own command line."""
    options = parse_options()
    logs.configure(level=options.log_level, fmt=options.log_format)
    sys.exit(run(options, make_host=make_held_host))


if __name__ == "__main__":
    main()
