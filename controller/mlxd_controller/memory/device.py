"""Measures memory without importing MLX.

`total` is the machine's memory, or the control group's if smaller; `budget` is the total without
the reserve, up to the operator's limit; `usable` is what others leave right now, again without the
reserve. A worker that loads moves bytes from "available" to "ours", which leaves `usable` as it
was. Each GPU is a device of its own, each with the reserve and the operator's limit.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import psutil

from mlxd_controller.memory.nvidia import VISIBLE_VARIABLE, Gpu, GpuUse, open_nvml, visible
from mlxd_controller.settings import Limits
from mlxd_models.fit.plan import Device
from mlxd_shared import config
from mlxd_shared.domain.devices import CUDA_BACKENDS, DeviceKind
from mlxd_shared.domain.figures import HostMemory
from mlxd_shared.ops.backends import installed_versions
from mlxd_shared.ops.logs import get_logger

CGROUP_ROOT = Path("/sys/fs/cgroup")
PROC_ROOT = Path("/proc")
VMSTAT = Path("/proc/vmstat")
METAL_SHARE = 0.75
"""The most of unified memory that Metal recommends to keep resident."""
_UNLIMITED = 1 << 60
_log = get_logger("device")


class HostProbe:
    """Implements ports.DeviceProbe for host memory: CPUs and unified memory."""

    def __init__(
        self, limits: Limits, *, kind: DeviceKind, cgroup_root: Path = CGROUP_ROOT
    ) -> None:
        """`kind` is cpu or metal."""
        self._limits = limits
        self._kind = kind
        self._cgroup_root = cgroup_root

    def read(self, own_pids: Iterable[int]) -> tuple[Device, ...]:
        """Return the one device; see the port. Reads a few small files of the system."""
        memory = psutil.virtual_memory()
        group = cgroup_memory(self._cgroup_root)
        total, available = memory.total, memory.available
        if group is not None and group.limit_bytes < total:
            total = group.limit_bytes
            available = min(available, max(0, group.limit_bytes - group.used_bytes))
        if self._kind is DeviceKind.METAL:
            total = int(total * METAL_SHARE)
        held = resident_bytes(own_pids)
        return (
            make_device(
                self._kind.first_name,
                self._kind,
                total_bytes=total,
                unheld_bytes=available + held,
                limits=self._limits,
                held_bytes=held,
            ),
        )

    def machines(self) -> tuple[HostMemory, ...]:
        """Return nothing besides this machine; see the port."""
        return ()


class GpuMeter(Protocol):
    """Measures what GPUs hold: the driver's library, or a fake."""

    def read(self, gpu_id: str) -> GpuUse | None:
        """Return what a GPU holds now; None if that cannot be determined. Never blocks."""


class CudaProbe:
    """Implements ports.DeviceProbe for CUDA: each GPU is a device.

    What others hold is measured each time, once the driver has listed a worker of ours among the
    holders of memory. Until then, and where the driver lists ids of another namespace, as in a
    container, the figures from the start are used.
    """

    def __init__(
        self, limits: Limits, *, gpus: tuple[Gpu, ...], meter: GpuMeter | None = None
    ) -> None:
        """Take the GPUs as they were before any worker ran; without `meter` they stay like that."""
        assert gpus
        self._limits = limits
        self._gpus = gpus
        self._meter = meter
        self._names_ours = False

    def read(self, own_pids: Iterable[int]) -> tuple[Device, ...]:
        """Return the devices; see the port. Queries the driver, which takes microseconds."""
        own = frozenset(own_pids)
        uses = [None if self._meter is None else self._meter.read(gpu.id) for gpu in self._gpus]
        ours = [sum(use.held[pid] for pid in own & use.held.keys()) if use else 0 for use in uses]
        self._names_ours = self._names_ours or any(ours)
        return tuple(
            self._device(gpu, use if self._names_ours else None, held)
            for gpu, use, held in zip(self._gpus, uses, ours, strict=True)
        )

    def machines(self) -> tuple[HostMemory, ...]:
        """Return nothing besides this machine; see the port."""
        return ()

    def _device(self, gpu: Gpu, use: GpuUse | None, held_bytes: int) -> Device:
        device = make_device(
            gpu.name,
            DeviceKind.CUDA,
            total_bytes=gpu.total_bytes,
            unheld_bytes=gpu.free_bytes if use is None else use.free_bytes + held_bytes,
            limits=self._limits,
            held_bytes=held_bytes,
        )
        return replace(device, id=gpu.id, product=gpu.product)


def make_device(
    name: str,
    kind: DeviceKind,
    *,
    total_bytes: int,
    unheld_bytes: int,
    limits: Limits,
    held_bytes: int = 0,
) -> Device:
    """Return a device with the operator's limits applied.

    `unheld_bytes` is what others do not hold, `held_bytes` the part of it that workers hold.
    """
    reserve = limits.reserve_bytes
    if reserve is None:
        reserve = int(total_bytes * limits.reserve_fraction)
    if kind is not DeviceKind.CPU:
        reserve += limits.gpu_overhead_bytes + int(total_bytes * limits.gpu_overhead_fraction)
    budget = max(0, total_bytes - reserve)
    if limits.memory_limit_bytes is not None:
        budget = min(budget, limits.memory_limit_bytes)
    usable = max(0, min(budget, unheld_bytes - reserve))
    return Device(name, kind, total_bytes, reserve, budget, usable, held_bytes=held_bytes)


def resident_bytes(pids: Iterable[int]) -> int:
    """Return the sum of the processes' resident sets; a process that has ended counts 0."""
    total = 0
    for pid in pids:
        try:
            total += psutil.Process(pid).memory_info().rss
        except psutil.NoSuchProcess:
            continue  # it ended meanwhile
    return total


def family_of(pid: int, *, root: Path = PROC_ROOT) -> tuple[int, ...]:
    """Return the ids of a process and of those that it has started; () once it has ended.

    Linux lists them by thread, below `root`; elsewhere every process of the machine is read.
    """
    try:
        threads = (root / f"{pid}" / "task").iterdir()
        lists = [(thread / "children").read_text() for thread in threads]
        return (pid, *(int(child) for listed in lists for child in listed.split()))
    except OSError:  # no such list here, or a thread of it has just ended
        pass
    try:
        return (pid, *(child.pid for child in psutil.Process(pid).children()))
    except psutil.NoSuchProcess:
        return ()


@dataclass(frozen=True, slots=True)
class ProcessUsage:
    """The system's figures of one process."""

    resident_nbytes: int
    cpu_s: float


def usage_of(pid: int) -> ProcessUsage | None:
    """Return the system's figures of a process; None if it has ended."""
    try:
        process = psutil.Process(pid)
        with process.oneshot():
            times = process.cpu_times()
            return ProcessUsage(process.memory_info().rss, times.user + times.system)
    except psutil.NoSuchProcess:
        return None


@dataclass(frozen=True, slots=True)
class CgroupMemory:
    """A control group's memory; page cache that can be dropped does not count as used."""

    limit_bytes: int
    used_bytes: int


def cgroup_memory(root: Path) -> CgroupMemory | None:
    """Return the limit on this process, from version 2 or 1; None if there is none."""
    for limit_file, used_file, cache_key in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file"),
    ):
        limit = _number(root / limit_file)
        used = _number(root / used_file)
        if limit is None or used is None or limit >= _UNLIMITED:
            continue
        cache = _stat((root / limit_file).parent / "memory.stat", cache_key)
        return CgroupMemory(limit, max(0, used - cache))
    return None


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None  # no such controller on this machine
    return int(text) if text.isdecimal() else None


def _stat(path: Path, key: str) -> int:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.split()[0] == key), 0)


def usable_gpus(environment: Mapping[str, str]) -> tuple[Gpu, ...]:
    """Return the GPUs that the installed backend can use, if any. Blocks."""
    if installed_versions().keys().isdisjoint(CUDA_BACKENDS):
        return ()
    driver = open_nvml()
    gpus = () if driver is None else driver.gpus()
    return visible(gpus, environment.get(VISIBLE_VARIABLE))


def make_probe(limits: Limits, *, gpus: tuple[Gpu, ...] = ()) -> HostProbe | CudaProbe:
    """Return a probe for `gpus`, as they were before any worker ran; without any, for the host."""
    if sys.platform == "darwin" and os.uname().machine == "arm64":
        return HostProbe(limits, kind=DeviceKind.METAL)
    if gpus:
        return CudaProbe(limits, gpus=gpus, meter=open_nvml())
    if limits.gpu_overhead_bytes or limits.gpu_overhead_fraction:
        _log.warning("no GPU here: the GPU overhead has no effect")
    return HostProbe(limits, kind=DeviceKind.CPU)


def oom_kills(vmstat: Path = VMSTAT) -> int | None:
    """Return how many processes the kernel has killed for lack of memory; None if unknown.

    Source: `oom_kill` in /proc/vmstat, since Linux 4.13, which counts kills for lack of the
    machine's memory and of a cgroup's alike, each before its SIGKILL is delivered.
    """
    try:
        lines = vmstat.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return None
    pairs = (line.split() for line in lines)
    return next((int(pair[1]) for pair in pairs if len(pair) == 2 and pair[0] == "oom_kill"), None)


def killed_from_outside(exit_code: int | None, *, before: int | None, now: int | None) -> bool:
    """Return whether somebody killed a process, so that its work is not to blame.

    A process, or one of its ranks, gets SIGKILL from outside or for lack of memory; `before` and
    `now` count the kills for lack of memory at its start and after its end. Without these counts
    nobody is cleared.
    """
    killed = exit_code in (-signal.SIGKILL, config.RANK_KILLED_CODE)
    return killed and before is not None and before == now
