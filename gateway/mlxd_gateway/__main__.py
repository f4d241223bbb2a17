"""`python -m mlxd_gateway SETTINGS`: a gateway in the foreground; SETTINGS is a JSON object.

Exit codes: 0 stopped, 2 wrong settings, with one line on stderr that names the field.
"""

from __future__ import annotations

import asyncio
import os
import sys

USAGE = "usage: python -m mlxd_gateway SETTINGS (a JSON object; see mlxd_gateway.settings)\n"


def main() -> int:
    """Serve until told to stop; return the exit code."""
    if len(sys.argv) != 2:
        sys.stderr.write(USAGE)
        return 2
    # A process that forks nothing has no use for gRPC's handlers; gRPC reads this at its import.
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    import uvloop  # noqa: PLC0415

    from mlxd_gateway.process import serve  # noqa: PLC0415
    from mlxd_gateway.settings import read_settings  # noqa: PLC0415
    from mlxd_shared import config  # noqa: PLC0415
    from mlxd_shared.domain.errors import MlxdError  # noqa: PLC0415
    from mlxd_shared.ops import logs  # noqa: PLC0415

    def announce(url: str) -> None:
        sys.stdout.write(f"{config.GATEWAY_LISTENS}{url}\n")
        sys.stdout.flush()

    try:
        settings = read_settings(sys.argv[1])
        logs.configure(level=settings.log_level, fmt=settings.log_format)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve(settings, on_ready=announce))
    except MlxdError as error:
        sys.stderr.write(f"mlxd: {' '.join(error.describe().split())}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
