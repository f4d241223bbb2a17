"""What memory there is, without importing MLX.

Invariants:
- `total` is the machine's, or the control group's where that is less; `budget` leaves the reserve
  and keeps to the operator's limit; `usable` leaves the reserve beside what others hold right now.
- A worker that is loading moves bytes from "available" to "ours": their sum, which is what
  `usable` is made of, stays the same.
"""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import psutil

from mlxd_controller.core.fit import Device
from mlxd_shared import config
from mlxd_shared.logs import get_logger

CGROUP_ROOT = Path("/sys/fs/cgroup")
NVIDIA_SMI_TIMEOUT_S = 10.0
METAL_SHARE = 0.75
"""The part of unified memory that Metal recommends to keep resident at most."""
_UNLIMITED = 1 << 60
_CUDA_BACKENDS = ("mlx-cuda-12", "mlx-cuda-13")
_log = get_logger("device")


@dataclass(frozen=True, slots=True)
class Limits:
    """What the operator allows: `reserve_bytes`, else a fraction of the total, stays free.

    Of each GPU `gpu_overhead_bytes`, and a fraction of its memory, stay free besides.
    """

    memory_limit_bytes: int | None = None
    reserve_bytes: int | None = None
    reserve_fraction: float = config.MEMORY_RESERVE_FRACTION
    gpu_overhead_bytes: int = 0
    gpu_overhead_fraction: float = 0.0

    def overhead(self, kind: str, total_bytes: int) -> int:
        """Return what stays free of one device besides the reserve: of a GPU alone."""
        if kind == "cpu":
            return 0
        return self.gpu_overhead_bytes + int(total_bytes * self.gpu_overhead_fraction)


class HostProbe:
    """Implements ports.DeviceProbe for host memory: CPUs and unified memory."""

    def __init__(self, limits: Limits, *, kind: str, cgroup_root: Path = CGROUP_ROOT) -> None:
        """Measure memory of this machine; `kind` is cpu or metal."""
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
        if self._kind == "metal":
            total = int(total * METAL_SHARE)
        held = resident_bytes(own_pids)
        name = "cpu" if self._kind == "cpu" else "gpu0"
        return (
            make_device(
                name,
                self._kind,
                total_bytes=total,
                unheld_bytes=available + held,
                limits=self._limits,
                held_bytes=held,
            ),
        )


class CudaProbe:
    """Implements ports.DeviceProbe for CUDA, as nvidia-smi told once at the start."""

    def __init__(self, limits: Limits, *, totals: tuple[tuple[int, int], ...]) -> None:
        """Take (total, free) bytes of each GPU, measured before any worker ran."""
        assert totals
        self._devices = tuple(
            make_device(f"gpu{index}", "cuda", total_bytes=total, unheld_bytes=free, limits=limits)
            for index, (total, free) in enumerate(totals)
        )

    def read(self, own_pids: Iterable[int]) -> tuple[Device, ...]:  # noqa: ARG002 - the port's
        """Return the devices as they were at the start."""
        return self._devices


def make_device(
    name: str,
    kind: str,
    *,
    total_bytes: int,
    unheld_bytes: int,
    limits: Limits,
    held_bytes: int = 0,
) -> Device:
    """Return a device with the operator's limits applied.

    `unheld_bytes` is what others do not hold, `held_bytes` what workers hold of that.
    """
    reserve = limits.reserve_bytes
    if reserve is None:
        reserve = int(total_bytes * limits.reserve_fraction)
    overhead = limits.overhead(kind, total_bytes)
    reserve += overhead
    budget = max(0, total_bytes - reserve)
    if limits.memory_limit_bytes is not None:
        budget = min(budget, limits.memory_limit_bytes)
    usable = max(0, min(budget, unheld_bytes - reserve))
    return Device(name, kind, total_bytes, reserve, budget, usable, held_bytes=held_bytes)


def resident_bytes(pids: Iterable[int]) -> int:
    """Return the sum of the processes' resident sets; one that is gone counts 0."""
    total = 0
    for pid in pids:
        try:
            total += psutil.Process(pid).memory_info().rss
        except psutil.NoSuchProcess:
            continue  # it ended between two looks
    return total


@dataclass(frozen=True, slots=True)
class CgroupMemory:
    """A control group's memory; what can be dropped (page cache) is not counted as used."""

    limit_bytes: int
    used_bytes: int


def cgroup_memory(root: Path) -> CgroupMemory | None:
    """Return the limit that holds this process, of version 2 or 1; None without one."""
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


def nvidia_memory() -> tuple[tuple[int, int], ...]:
    """Return (total, free) bytes of each GPU that nvidia-smi names; () without it. Blocks."""
    command = (
        "nvidia-smi",
        "--query-gpu=memory.total,memory.free",
        "--format=csv,noheader,nounits",
    )
    try:
        found = subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=NVIDIA_SMI_TIMEOUT_S
        )
    except (OSError, subprocess.SubprocessError) as error:
        _log.info("nvidia-smi gave nothing", reason=str(error))
        return ()
    rows = [line.split(",") for line in found.stdout.splitlines() if line.strip()]
    return tuple((int(total) * config.MIB, int(free) * config.MIB) for total, free in rows)


def make_probe(limits: Limits) -> HostProbe | CudaProbe:
    """Return the probe for the backend that is installed here. Blocks for a moment on CUDA."""
    if sys.platform == "darwin" and os.uname().machine == "arm64":
        return HostProbe(limits, kind="metal")
    if any(_installed(name) for name in _CUDA_BACKENDS):
        totals = nvidia_memory()
        if totals:
            return CudaProbe(limits, totals=totals)
    if limits.gpu_overhead_bytes or limits.gpu_overhead_fraction:
        _log.warning("there is no GPU here, of which an overhead could be kept free")
    return HostProbe(limits, kind="cpu")


def _installed(distribution: str) -> bool:
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
