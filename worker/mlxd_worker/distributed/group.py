"""How the processes of one model find each other: environments, made before MLX is imported.

Invariants:
- On CUDA each rank sees one device, and NCCL's multicast over NVLink is off: hosts whose fabric
  manager is not set up for it hang in it. On CPUs the ranks are a ring over the loopback.
- What says where the ring's ranks are is a file without a name, which lasts as long as the leader.
- NCCL is kept to the loopback where it can be: the port at which MLX's ranks find each other is on
  all addresses until they have (docs/ranks.md).
- MLX holds the interpreter while it joins: a timer of C ends a process that does not get through.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

from mlxd_shared import config
from mlxd_shared.domain.devices import DeviceKind
from mlxd_shared.domain.errors import BackendProblem
from mlxd_worker.machine.gpus import count_gpus

if TYPE_CHECKING:
    from mlxd_worker.models.weights.shards import Share

LOOPBACK = "127.0.0.1"
STOP_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)
"""They may go to every process of a group, and are the leader's to obey: followers end after it."""
VISIBLE = "CUDA_VISIBLE_DEVICES"
STDERR: Final = 2


@dataclass(frozen=True, slots=True)
class Group:
    """The ranks of one model on this host."""

    ranks: int
    kind: DeviceKind
    places: tuple[str, ...]
    """On CUDA each rank's device; on CPUs its address."""
    shared: Mapping[str, str]
    """What all their environments say."""
    descriptors: tuple[int, ...] = ()
    """What each of their processes has to inherit."""

    def environment(self, rank: int) -> dict[str, str]:
        """Return what a rank's environment says besides."""
        own = {"MLX_RANK": str(rank), **self.shared}
        if self.kind is DeviceKind.CUDA:
            own[VISIBLE] = self.places[rank]
        return own


def make_group(
    ranks: int,
    kind: DeviceKind,
    environ: Mapping[str, str] = os.environ,
    *,
    count: Callable[[], int | None] = count_gpus,
) -> Group:
    """Return a group on this host, its ports free a moment ago; before MLX is imported.

    count: returns how many GPUs there are; None: nobody knows.

    Raises:
        BackendProblem: ranks have no device each, or no way to reach each other here.
    """
    if kind is DeviceKind.CUDA:
        visible, gpus = environ.get(VISIBLE), count()
        named = range(ranks if gpus is None else gpus)
        devices = tuple(visible.split(",")) if visible else tuple(map(str, named))
        if len(devices) < ranks:
            whose = VISIBLE if visible else "this machine"
            raise BackendProblem(f"--ranks {ranks}: {whose} has {len(devices)} devices")
        shared = {
            "MLX_WORLD_SIZE": str(ranks),
            "NCCL_HOST_IP": LOOPBACK,
            "NCCL_PORT": str(_free_ports(1)[0]),
            "NCCL_NVLS_ENABLE": "0",
            "NCCL_SOCKET_IFNAME": "lo",
        }
        return Group(ranks, kind, devices[:ranks], shared)
    if kind is not DeviceKind.CPU:
        raise BackendProblem(f"--ranks {ranks}: ranks are not served on {kind.value}")
    places = tuple(f"{LOOPBACK}:{port}" for port in _free_ports(ranks))
    descriptor = os.memfd_create("mlxd-ranks")
    os.write(descriptor, json.dumps([[place] for place in places]).encode())
    shared = {"MLX_HOSTFILE": f"/proc/self/fd/{descriptor}"}
    return Group(ranks, kind, places, shared, (descriptor,))


def join_group(rank: int, ranks: int, kind: DeviceKind) -> Share:
    """Meet the other ranks, and return this one's share; imports MLX, blocks until all are there.

    The process ends where that takes longer than RANK_JOIN_S.

    Raises:
        BackendProblem: they did not come.
    """
    import mlx.core as mx  # noqa: PLC0415 - the environment has to be there first

    from mlxd_worker.models.weights.shards import Share  # noqa: PLC0415

    backend = "nccl" if kind is DeviceKind.CUDA else "ring"
    with _ending_after(config.RANK_JOIN_S):
        try:
            group = mx.distributed.init(strict=True, backend=backend)
        except RuntimeError as error:
            raise BackendProblem(f"rank {rank} of {ranks}: {error}") from error
        if (group.rank(), group.size()) != (rank, ranks):
            problem = f"rank {rank} of {ranks}: {backend} made it {group.rank()} of {group.size()}"
            raise BackendProblem(problem)
        mx.eval(mx.distributed.all_sum(mx.ones(1), group=group))  # all are there
    return Share(rank, ranks, partial(mx.distributed.all_sum, group=group))


@contextmanager
def _ending_after(limit_s: float) -> Iterator[None]:
    """End the process, and show where it is, if this takes longer."""
    faulthandler.dump_traceback_later(limit_s, exit=True, file=STDERR)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def _free_ports(count: int) -> list[int]:
    held = [socket.create_server((LOOPBACK, 0)) for _ in range(count)]
    try:
        return [its.getsockname()[1] for its in held]
    finally:
        for its in held:
            its.close()
