"""How the processes of one model find each other: environments, made before MLX is imported.

Invariants:
- On CUDA each rank sees one device, and NCCL's multicast over NVLink is off: hosts whose fabric
  manager is not set up for it hang in it. On CPUs the ranks are a ring over the loopback.
- Ranks of one host divide the threads of the math library: with all of them each, four times as
  slow (two ranks, two cores).
"""

from __future__ import annotations

import json
import os
import socket
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mlxd_shared.domain.devices import DeviceKind
from mlxd_shared.domain.errors import BackendProblem

if TYPE_CHECKING:
    from mlxd_worker.models.weights.shards import Share

LOOPBACK = "127.0.0.1"
VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True, slots=True)
class Group:
    """The ranks of one model on this host."""

    ranks: int
    kind: DeviceKind
    places: tuple[str, ...]
    """On CUDA each rank's device; on CPUs its address."""
    shared: Mapping[str, str]
    """What all their environments say."""

    def environment(self, rank: int) -> dict[str, str]:
        """Return what a rank's environment says besides."""
        own = {"MLX_RANK": str(rank), **self.shared}
        if self.kind is DeviceKind.CUDA:
            own[VISIBLE] = self.places[rank]
        return own


def make_group(ranks: int, kind: DeviceKind, environ: Mapping[str, str] = os.environ) -> Group:
    """Return a group on this host, its ports free a moment ago.

    Raises:
        BackendProblem: ranks have no device each, or no way to reach each other here.
    """
    if kind is DeviceKind.CUDA:
        visible = environ.get(VISIBLE)
        devices = tuple(visible.split(",")) if visible else tuple(map(str, range(ranks)))
        if len(devices) < ranks:
            raise BackendProblem(f"--ranks {ranks}: {VISIBLE} has {len(devices)} devices")
        shared = {
            "MLX_WORLD_SIZE": str(ranks),
            "NCCL_HOST_IP": LOOPBACK,
            "NCCL_PORT": str(_free_ports(1)[0]),
            "NCCL_NVLS_ENABLE": "0",
        }
        return Group(ranks, kind, devices[:ranks], shared)
    if kind is not DeviceKind.CPU:
        raise BackendProblem(f"--ranks {ranks}: ranks are not served on {kind.value}")
    places = tuple(f"{LOOPBACK}:{port}" for port in _free_ports(ranks))
    descriptor, path = tempfile.mkstemp(prefix="mlxd-ranks-", suffix=".json")
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        json.dump([[place] for place in places], file)
    return Group(ranks, kind, places, {"MLX_HOSTFILE": path})


def join_group(rank: int, ranks: int, kind: DeviceKind) -> Share:
    """Meet the other ranks, and return this one's share; imports MLX, blocks until all are there.

    Raises:
        BackendProblem: they did not come.
    """
    import mlx.core as mx  # noqa: PLC0415 - the environment has to be there first

    from mlxd_worker.models.weights.shards import Share  # noqa: PLC0415

    backend = "nccl" if kind is DeviceKind.CUDA else "ring"
    try:
        group = mx.distributed.init(strict=True, backend=backend)
    except RuntimeError as error:
        raise BackendProblem(f"rank {rank} of {ranks}: {error}") from error
    if (group.rank(), group.size()) != (rank, ranks):
        problem = f"rank {rank} of {ranks}: {backend} made it {group.rank()} of {group.size()}"
        raise BackendProblem(problem)
    if path := os.environ.get("MLX_HOSTFILE"):
        mx.eval(mx.distributed.all_sum(mx.ones(1), group=group))  # all have read it
        if rank == 0:
            Path(path).unlink(missing_ok=True)
    return Share(rank, ranks, group)


def _free_ports(count: int) -> list[int]:
    held = [socket.create_server((LOOPBACK, 0)) for _ in range(count)]
    try:
        return [its.getsockname()[1] for its in held]
    finally:
        for its in held:
            its.close()
