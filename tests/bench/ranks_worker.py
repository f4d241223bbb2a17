"""`python -m tests.bench.ranks_worker`: a worker, and the first of its ranks, with random weights.

`python -m tests.bench.ranks_worker serve ...` is a controller that starts such workers.
"""

from __future__ import annotations

import os
import sys
from functools import partial
from typing import TYPE_CHECKING

from mlxd_controller import crew
from mlxd_controller.cli import main as run_mlxd
from mlxd_controller.launcher.subprocess import SubprocessLauncher
from mlxd_shared.domain.devices import DeviceKind
from mlxd_shared.ops import logs
from mlxd_worker.__main__ import run
from mlxd_worker.distributed.group import make_group
from mlxd_worker.process.options import Options, parse_options

if TYPE_CHECKING:
    from mlxd_worker.thread.host import ModelHost

FOLLOWER = "tests.bench.ranks_follower"
COMMAND = (sys.executable, "-m", "tests.bench.ranks_worker")


def make_host(options: Options, device: DeviceKind) -> ModelHost:
    """Return a host whose weights are random, on the engine thread, where MLX may be."""
    group = make_group(options.ranks, device) if options.ranks > 1 else None
    if group is not None:
        os.environ.update(group.environment(0))
    from tests.bench.ranks_weights import read_random  # noqa: PLC0415 - imports MLX

    read_random()
    from mlxd_worker.distributed.leader import LeaderHost  # noqa: PLC0415
    from mlxd_worker.thread.host import ModelHost  # noqa: PLC0415

    if group is None:
        return ModelHost(device=device)
    return LeaderHost(device, group=group, module=FOLLOWER)


def main() -> None:
    """Be a controller, or one of its workers."""
    if sys.argv[1:2] == ["serve"]:
        launcher = partial(SubprocessLauncher, command=COMMAND)
        crew.SubprocessLauncher = launcher  # type: ignore[attr-defined, assignment]
        run_mlxd()
        return
    options = parse_options()
    logs.configure(level=options.log_level, fmt=options.log_format)
    sys.exit(run(options, make_host=partial(make_host, options)))


if __name__ == "__main__":
    main()
