"""A worker, real but for one fault: its engine's loop breaks after STEPS_GOOD steps.

These are counted once there are as many streams as the environment says, or one; so none that was
sent meanwhile comes too late to be told.
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

FAULT = "this engine is broken on purpose"
STEPS_GOOD = 3
STREAMS_VARIABLE = "TEST_STREAMS"


def make_faulty_host(kind: DeviceKind) -> ModelHost:
    """Return a host that breaks in the middle of its work; imports MLX."""
    from mlxd_worker.thread.host import ModelHost  # noqa: PLC0415 - after the BLAS, on its thread

    class FaultyHost(ModelHost):
        """Steps, and at last fails."""

        left = STEPS_GOOD
        streams_min = int(os.environ.get(STREAMS_VARIABLE, "1"))

        def step(self) -> None:
            """Step or fail."""
            if self.left == 0:
                raise RuntimeError(FAULT)
            assert self._resident is not None
            if self._resident.engine.streams >= self.streams_min:
                self.left -= 1
            super().step()

    return FaultyHost(device=kind)


def main() -> None:
    """Run it with the worker's own command line."""
    options = parse_options()
    logs.configure(level=options.log_level, fmt=options.log_format)
    sys.exit(run(options, make_host=make_faulty_host))


if __name__ == "__main__":
    main()
