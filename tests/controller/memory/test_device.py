"""Memory as the machine, its control group and the operator allow it."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from mlxd_controller.memory.device import (
    PROC_ROOT,
    CgroupMemory,
    CudaProbe,
    HostProbe,
    cgroup_memory,
    family_of,
    make_device,
    resident_bytes,
    usage_of,
)
from mlxd_controller.memory.nvidia import Gpu, GpuUse, visible
from mlxd_controller.settings import Limits
from mlxd_shared.config import GIB, MIB
from mlxd_shared.domain.devices import DeviceKind

NO_PROCESS = 2**22 + 1
LOOKS = 50
PARENT = """
import subprocess, sys, threading
def start():
    with subprocess.Popen(["cat"], stdin=sys.stdin) as child:
        print(child.pid, flush=True)
thread = threading.Thread(target=start)
thread.start()
thread.join()
"""
"""Starts one on a thread of its own, and ends with it once there is no more input."""


def write(root: Path, files: dict[str, str]) -> Path:
    """Write small files below `root`."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


V2 = {
    "memory.max": f"{GIB}\n",
    "memory.current": f"{600 * MIB}\n",
    "memory.stat": f"anon 1\ninactive_file {100 * MIB}\n",
}
V1 = {
    "memory/memory.limit_in_bytes": f"{GIB}\n",
    "memory/memory.usage_in_bytes": f"{600 * MIB}\n",
    "memory/memory.stat": f"cache 5\ntotal_inactive_file {100 * MIB}\n",
}


@pytest.mark.parametrize("files", [V2, V1], ids=["version 2", "version 1"])
def test_a_control_groups_limit_is_read(files: dict[str, str], tmp_path: Path) -> None:
    """Limit and use, without the page cache that the system drops when it must."""
    assert cgroup_memory(write(tmp_path, files)) == CgroupMemory(GIB, 500 * MIB)


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"memory.max": "max\n", "memory.current": "5\n"},
        {
            "memory/memory.limit_in_bytes": f"{(1 << 63) - 4096}\n",
            "memory/memory.usage_in_bytes": "5\n",
        },
    ],
    ids=["none", "unlimited 2", "unlimited 1"],
)
def test_no_limit_is_no_limit(files: dict[str, str], tmp_path: Path) -> None:
    """Absent, "max" and the huge number of version 1 all mean the machine's own memory."""
    assert cgroup_memory(write(tmp_path, files)) is None


def test_a_control_group_smaller_than_the_machine_is_the_machine(tmp_path: Path) -> None:
    """Total, reserve and what is usable are the group's."""
    probe = HostProbe(Limits(), kind=DeviceKind.CPU, cgroup_root=write(tmp_path, V2))
    (device,) = probe.read(())
    assert device.total_bytes == GIB
    assert device.reserve_bytes == GIB // 10
    assert device.usable_bytes == GIB - 500 * MIB - GIB // 10
    assert device.held_bytes == 0


def test_what_our_own_workers_hold_is_usable(tmp_path: Path) -> None:
    """A loading worker moves bytes from available to ours; the sum is what models may use."""
    probe = HostProbe(
        Limits(memory_limit_bytes=1 << 60, reserve_bytes=0),
        kind=DeviceKind.CPU,
        cgroup_root=tmp_path,
    )
    own = psutil.Process().memory_info().rss

    def counts_as_usable() -> bool:
        (without,), (with_own,) = probe.read(()), probe.read((os.getpid(),))
        assert with_own.held_bytes == pytest.approx(own, abs=own / 2)
        if with_own.usable_bytes == with_own.budget_bytes:
            return True
        return with_own.usable_bytes - without.usable_bytes == pytest.approx(own, abs=own / 2)

    # Other processes move between the two looks: mostly a little, now and then by much.
    assert any(counts_as_usable() for _ in range(LOOKS))


def test_the_operators_limits_bound_the_budget() -> None:
    """Reserve in bytes before the fraction, beside what others hold; a limit caps the budget."""
    plain = make_device("cpu", DeviceKind.CPU, total_bytes=1000, unheld_bytes=990, limits=Limits())
    assert (plain.reserve_bytes, plain.budget_bytes, plain.usable_bytes) == (100, 900, 890)
    reserve = make_device(
        "cpu", DeviceKind.CPU, total_bytes=1000, unheld_bytes=990, limits=Limits(reserve_bytes=400)
    )
    assert reserve.budget_bytes == 600
    limit = make_device(
        "cpu",
        DeviceKind.CPU,
        total_bytes=1000,
        unheld_bytes=350,
        limits=Limits(memory_limit_bytes=300),
    )
    assert (limit.budget_bytes, limit.usable_bytes) == (300, 250)
    over = make_device(
        "cpu", DeviceKind.CPU, total_bytes=1000, unheld_bytes=50, limits=Limits(reserve_bytes=2000)
    )
    assert (over.budget_bytes, over.usable_bytes) == (0, 0)


def test_an_overhead_is_kept_free_of_each_gpu_besides_the_reserve() -> None:
    """In bytes or as a share; out of the budget and out of what is free now; not of a CPU."""
    for limits in (Limits(gpu_overhead_bytes=50), Limits(gpu_overhead_fraction=0.05)):
        gpu = make_device(
            "gpu0", DeviceKind.CUDA, total_bytes=1000, unheld_bytes=800, limits=limits
        )
        assert (gpu.reserve_bytes, gpu.budget_bytes, gpu.usable_bytes) == (150, 850, 650)
        cpu = make_device("cpu", DeviceKind.CPU, total_bytes=1000, unheld_bytes=800, limits=limits)
        assert (cpu.reserve_bytes, cpu.budget_bytes, cpu.usable_bytes) == (100, 900, 700)
    full = make_device(
        "gpu0",
        DeviceKind.METAL,
        total_bytes=1000,
        unheld_bytes=110,
        limits=Limits(gpu_overhead_bytes=50),
    )
    assert full.usable_bytes == 0


def test_a_process_that_is_gone_holds_nothing() -> None:
    """It may end between two looks."""
    assert resident_bytes([NO_PROCESS]) == 0
    assert resident_bytes([os.getpid(), NO_PROCESS]) > 0


def test_a_family_is_what_linux_lists_by_thread(tmp_path: Path) -> None:
    """A few small files are read, and the machine's other processes are not."""
    lists = {
        f"{NO_PROCESS}/task/{NO_PROCESS}/children": "7 8 ",
        f"{NO_PROCESS}/task/9/children": "6",
    }
    family = family_of(NO_PROCESS, root=write(tmp_path, lists))
    assert family[0] == NO_PROCESS
    assert sorted(family[1:]) == [6, 7, 8]


@pytest.mark.parametrize("listed", [True, False], ids=["listed", "looked for"])
def test_children_of_every_thread_are_family(tmp_path: Path, *, listed: bool) -> None:
    """Also where nothing is listed; what has ended has no family."""
    its = subprocess.Popen(
        [sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    root = PROC_ROOT if listed else tmp_path
    with its:
        assert its.stdout is not None
        child = int(its.stdout.readline())
        assert family_of(its.pid, root=root) == (its.pid, child)
        its.communicate("")
    assert family_of(its.pid, root=root) == ()


def test_the_system_tells_what_a_process_uses() -> None:
    """Memory and CPU time of one that lives, and nothing of one that has ended meanwhile."""
    own = usage_of(os.getpid())

    assert own is not None
    assert own.resident_nbytes > MIB
    assert own.cpu_s > 0
    assert usage_of(NO_PROCESS) is None


FIRST = "GPU-6bee2bb7-44a4-97a1-ae8d-9c873cd740c5"
SECOND = "GPU-2a79f0aa-ab44-613a-165c-4374595a54c1"
GPUS = (
    Gpu(0, FIRST, "NVIDIA H200", 143771 * MIB, 143156 * MIB),
    Gpu(1, SECOND, "NVIDIA H200", 143771 * MIB, 143156 * MIB),
)
PID, HELD, FREE_BESIDE = 616, 1_616_904_192, 148_483_735_552
"""What the driver said there of a process on the second GPU, and what was free beside it."""


@pytest.mark.parametrize(
    ("said", "seen"),
    [
        (None, GPUS),
        ("", ()),
        ("1", GPUS[1:]),
        ("1,0", (GPUS[1], GPUS[0])),
        (f" {SECOND} ", GPUS[1:]),
        ("GPU-2a79", GPUS[1:]),
        ("0,7,1", GPUS[:1]),
        ("GPU-", ()),
        ("0,0,1", GPUS[:1]),
        ("-1", ()),
    ],
)
def test_what_the_controller_may_not_see_is_not_there(
    said: str | None, seen: tuple[Gpu, ...]
) -> None:
    """CUDA_VISIBLE_DEVICES in its own environment: places or ids, up to the first that is none."""
    assert visible(GPUS, said) == seen


def test_each_gpu_is_a_device_with_limits_of_its_own() -> None:
    """Named by its place; what was in use at the start is not usable, on that one alone."""
    taken = replace(GPUS[1], free_bytes=9000 * MIB)
    first, second = CudaProbe(Limits(reserve_bytes=GIB), gpus=(GPUS[0], taken)).read(())

    assert (first.name, second.name) == ("gpu0", "gpu1")
    assert (second.kind, second.id, second.product) == ("cuda", SECOND, "NVIDIA H200")
    assert first.usable_bytes == 143156 * MIB - GIB
    assert second.usable_bytes == 9000 * MIB - GIB < second.budget_bytes


class Driver:
    """What the driver says: of each GPU what is free, and who holds what of it."""

    def __init__(self, uses: dict[str, GpuUse]) -> None:
        self.uses = uses

    def read(self, gpu_id: str) -> GpuUse | None:
        """Answer."""
        return self.uses.get(gpu_id)


def test_what_a_worker_holds_of_its_gpu_is_usable_and_what_others_take_is_not() -> None:
    """From the moment at which the driver names a worker, each GPU is measured each time."""
    driver = Driver({FIRST: GpuUse(GIB, {}), SECOND: GpuUse(FREE_BESIDE, {PID: HELD, 7: GIB})})
    probe = CudaProbe(Limits(reserve_bytes=0), gpus=GPUS, meter=driver)

    first, second = probe.read((PID, NO_PROCESS))

    assert (first.usable_bytes, first.held_bytes) == (GIB, 0)
    assert (second.usable_bytes, second.held_bytes) == (FREE_BESIDE + HELD, HELD)
    driver.uses = {SECOND: GpuUse(FREE_BESIDE, {})}
    first, second = probe.read(())
    assert first.usable_bytes == 143156 * MIB  # it does not say, and the start is what is known
    assert (second.usable_bytes, second.held_bytes) == (FREE_BESIDE, 0)


def test_until_the_driver_has_named_a_worker_the_start_is_what_is_known() -> None:
    """In a container it names others' ids only: a worker's memory must not pass for others'."""
    driver = Driver({FIRST: GpuUse(GIB, {}), SECOND: GpuUse(GIB, {40_616: HELD})})
    probe = CudaProbe(Limits(reserve_bytes=0), gpus=GPUS, meter=driver)

    for device in probe.read((PID,)):
        assert (device.usable_bytes, device.held_bytes) == (143156 * MIB, 0)
