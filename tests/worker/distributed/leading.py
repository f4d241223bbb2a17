"""A leader for a test, and its followers' processes; imports MLX only when one is made."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import psutil

from mlxd_shared.domain.devices import DeviceKind
from mlxd_worker.distributed.group import make_group

if TYPE_CHECKING:
    from mlxd_worker.distributed.leader import LeaderHost


def lead(ranks: int, kind: DeviceKind = DeviceKind.CPU, *, module: str = "") -> LeaderHost:
    """Make this process the first of `ranks`; the others run `module`, or what they always do."""
    group = make_group(ranks, kind)
    os.environ.update(group.environment(0))
    from mlxd_worker.distributed.leader import FOLLOWER, LeaderHost  # noqa: PLC0415 - imports MLX

    return LeaderHost(kind, group=group, module=module or FOLLOWER)


def pid_of(rank: int) -> int:
    """Return the process of a follower of this process's."""
    (pid,) = [
        child.pid
        for child in psutil.Process().children()
        if ["--rank", str(rank)] in [child.cmdline()[at : at + 2] for at in range(20)]
    ]
    return pid
