"""How ranks find each other: refused where they cannot, and nothing of it is left."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest

from mlxd_shared.domain.devices import DeviceKind
from mlxd_shared.domain.errors import BackendProblem
from mlxd_worker.__main__ import _leader
from mlxd_worker.distributed.group import make_group
from mlxd_worker.process.interpreter import SWITCH_INTERVAL_S
from mlxd_worker.process.options import parse_options
from tests.worker.fresh_process import environment, run

FOLLOWER = """
import json, socket, sys
from mlxd_worker.distributed import __main__, follower

def follow(wire, **its):
    print(json.dumps([sys.getswitchinterval(), follower._log.is_enabled_for(30), its["rank"]]))

follower.follow = follow
ours, theirs = socket.socketpair()
sys.argv = ["rank", "--fd", str(theirs.fileno()), "--rank", "1", "--ranks", "2"]
sys.argv += ["--log-level", "error"]
__main__.main()
"""


@pytest.mark.parametrize("environ", [{"CUDA_VISIBLE_DEVICES": "1,5"}, {}])
def test_fewer_devices_than_ranks_are_refused(environ: dict[str, str]) -> None:
    """Those that are named count, or else those that the driver has."""
    with pytest.raises(BackendProblem, match=r"--ranks 3: .* has 2 devices"):
        make_group(3, DeviceKind.CUDA, environ, count=lambda: 2)


def test_devices_are_given_out_where_nobody_can_count_them() -> None:
    """Each rank has one of its own, and NCCL keeps to the loopback."""
    group = make_group(2, DeviceKind.CUDA, {}, count=lambda: None)
    second = group.environment(1)
    assert group.environment(0)["CUDA_VISIBLE_DEVICES"] == "0"
    assert (second["CUDA_VISIBLE_DEVICES"], second["NCCL_SOCKET_IFNAME"]) == ("1", "lo")


def test_a_device_without_ranks_is_said_before_anything_is_started() -> None:
    """On the thread that prepares the worker, where it is a reason not to start."""
    with pytest.raises(BackendProblem, match="metal"):
        _leader(parse_options(["--ranks", "2"]), DeviceKind.METAL, threading.Event())


def test_where_ranks_are_has_no_name_on_disk() -> None:
    """However a group ends, no file is left of it."""
    group = make_group(2, DeviceKind.CPU)
    (descriptor,) = group.descriptors
    try:
        path = Path(group.environment(1)["MLX_HOSTFILE"])
        assert [place for (place,) in json.loads(path.read_text())] == list(group.places)
        assert os.fstat(descriptor).st_nlink == 0
    finally:
        os.close(descriptor)


def test_a_follower_runs_as_its_leader_does() -> None:
    """Its interpreter gives threads way as soon, and its log has the leader's level."""
    assert run(FOLLOWER, environment()) == [pytest.approx(SWITCH_INTERVAL_S), False, 1]
