"""A worker, real but for one fault: of the first stream that is cancelled, a row is never left."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from mlxd_shared.domain.devices import DeviceKind
from mlxd_shared.ops import logs
from mlxd_worker.__main__ import run
from mlxd_worker.engine.request import Cancel
from mlxd_worker.process.options import parse_options

if TYPE_CHECKING:
    from mlxd_worker.thread.host import ModelHost

LEAKED_ROW = 1 << 40
"""A number that no stream's row ever gets."""


def make_leaking_host(kind: DeviceKind) -> ModelHost:
    """Return a host that loses one row; imports MLX."""
    from mlxd_worker.cache.base import RowId  # noqa: PLC0415 - after the BLAS, on its thread
    from mlxd_worker.thread.host import ModelHost  # noqa: PLC0415

    class LeakingHost(ModelHost):
        """Gives back all rows but one."""

        leaked = False

        def cancel(self, request: Cancel) -> None:
            """Forget a stream; the first time, keep a row as if its caches had not been left."""
            super().cancel(request)
            if not self.leaked and self._resident is not None:
                self.leaked = True
                self._resident.caches.join(RowId(LEAKED_ROW), tokens=1)

    return LeakingHost(device=kind)


def main() -> None:
    """Run it with the worker's own command line."""
    options = parse_options()
    logs.configure(level=options.log_level, fmt=options.log_format)
    sys.exit(run(options, make_host=make_leaking_host))


if __name__ == "__main__":
    main()
