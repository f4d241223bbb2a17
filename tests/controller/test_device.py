"""Memory as the machine, its control group and the operator allow it."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest

from mlxd_controller.device import (
    CgroupMemory,
    CudaProbe,
    HostProbe,
    Limits,
    cgroup_memory,
    make_device,
    nvidia_memory,
    resident_bytes,
)
from mlxd_shared.config import GIB, MIB

NO_PROCESS = 2**22 + 1


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
    probe = HostProbe(Limits(), kind="cpu", cgroup_root=write(tmp_path, V2))
    (device,) = probe.read(())
    assert device.total_bytes == GIB
    assert device.reserve_bytes == GIB // 10
    assert device.usable_bytes == GIB - 500 * MIB - GIB // 10
    assert device.held_bytes == 0


def test_what_our_own_workers_hold_is_usable(tmp_path: Path) -> None:
    """A loading worker moves bytes from available to ours; the sum is what models may use."""
    probe = HostProbe(
        Limits(memory_limit_bytes=1 << 60, reserve_bytes=0), kind="cpu", cgroup_root=tmp_path
    )
    own = psutil.Process().memory_info().rss
    (without,), (with_own,) = probe.read(()), probe.read((os.getpid(),))
    gained = with_own.usable_bytes - without.usable_bytes
    # Other processes move a little between the two looks.
    assert with_own.held_bytes == pytest.approx(own, abs=own / 2)
    assert gained == pytest.approx(own, abs=own / 2) or with_own.usable_bytes == (
        with_own.budget_bytes
    )


def test_the_operators_limits_bound_the_budget() -> None:
    """Reserve in bytes before the fraction, beside what others hold; a limit caps the budget."""
    plain = make_device("cpu", "cpu", total_bytes=1000, unheld_bytes=990, limits=Limits())
    assert (plain.reserve_bytes, plain.budget_bytes, plain.usable_bytes) == (100, 900, 890)
    reserve = make_device(
        "cpu", "cpu", total_bytes=1000, unheld_bytes=990, limits=Limits(reserve_bytes=400)
    )
    assert reserve.budget_bytes == 600
    limit = make_device(
        "cpu", "cpu", total_bytes=1000, unheld_bytes=350, limits=Limits(memory_limit_bytes=300)
    )
    assert (limit.budget_bytes, limit.usable_bytes) == (300, 250)
    over = make_device(
        "cpu", "cpu", total_bytes=1000, unheld_bytes=50, limits=Limits(reserve_bytes=2000)
    )
    assert (over.budget_bytes, over.usable_bytes) == (0, 0)


def test_an_overhead_is_kept_free_of_each_gpu_besides_the_reserve() -> None:
    """In bytes or as a share; out of the budget and out of what is free now; not of a CPU."""
    for limits in (Limits(gpu_overhead_bytes=50), Limits(gpu_overhead_fraction=0.05)):
        gpu = make_device("gpu0", "cuda", total_bytes=1000, unheld_bytes=800, limits=limits)
        assert (gpu.reserve_bytes, gpu.budget_bytes, gpu.usable_bytes) == (150, 850, 650)
        cpu = make_device("cpu", "cpu", total_bytes=1000, unheld_bytes=800, limits=limits)
        assert (cpu.reserve_bytes, cpu.budget_bytes, cpu.usable_bytes) == (100, 900, 700)
    full = make_device(
        "gpu0", "metal", total_bytes=1000, unheld_bytes=110, limits=Limits(gpu_overhead_bytes=50)
    )
    assert full.usable_bytes == 0


def test_a_process_that_is_gone_holds_nothing() -> None:
    """It may end between two looks."""
    assert resident_bytes([NO_PROCESS]) == 0
    assert resident_bytes([os.getpid(), NO_PROCESS]) > 0


def test_gpus_are_read_from_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each line is a GPU: total and free MiB; what was in use at the start is not usable."""
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho '81559, 81000'\necho '81559, 9000'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)

    totals = nvidia_memory()

    assert totals == ((81559 * MIB, 81000 * MIB), (81559 * MIB, 9000 * MIB))
    first, second = CudaProbe(Limits(), totals=totals).read(())
    assert (first.name, second.name) == ("gpu0", "gpu1")
    assert second.usable_bytes == 9000 * MIB - second.reserve_bytes < second.budget_bytes


def test_a_failing_nvidia_smi_is_no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver that does not answer is logged, and host memory is what there is."""
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\nexit 9\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert nvidia_memory() == ()
