"""How many cores this process may really use: affinity and the control groups' quotas, both."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path

CGROUP_ROOT = Path("/sys/fs/cgroup")
PROCESS_CGROUP = Path("/proc/self/cgroup")


def available_cores(
    *, cgroup_root: Path = CGROUP_ROOT, process_cgroup: Path = PROCESS_CGROUP
) -> int:
    """Return the cores this process may use, at least 1; part of a core counts as one."""
    if sys.platform != "linux":
        return os.cpu_count() or 1
    allowed = len(os.sched_getaffinity(0))
    quotas = [
        quota
        for folder in _cgroup_folders(cgroup_root, process_cgroup)
        if (quota := _quota(folder)) is not None
    ]
    return max(1, min([allowed, *(math.ceil(quota) for quota in quotas)]))


def _cgroup_folders(root: Path, process_cgroup: Path) -> Iterator[Path]:
    """Yield the folders whose quotas bind us: ours and all above it, of both cgroup versions."""
    for line in _read(process_cgroup).splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers and "cpu" not in controllers.split(","):
            continue
        top = root / controllers if controllers else root
        own = top / path.lstrip("/")
        yield own
        yield from (folder for folder in own.parents if folder.is_relative_to(top))


def _quota(folder: Path) -> float | None:
    """Return the cores that a group's quota allows, or None where it sets none."""
    limit, _, period = _read(folder / "cpu.max").strip().partition(" ")
    if not limit:
        limit = _read(folder / "cpu.cfs_quota_us").strip()
        period = _read(folder / "cpu.cfs_period_us").strip()
    if not (limit.isdigit() and period.isdigit() and int(period) > 0):
        return None  # "max", -1, or no such file
    return int(limit) / int(period)


def _read(path: Path) -> str:
    """Return a file's text; a file that is not there, or not for us, sets no limit."""
    try:
        return path.read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError):
        return ""
