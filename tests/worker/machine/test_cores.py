"""How many cores a process may use: the least of its affinity and of every quota above it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from mlxd_worker.machine.cores import available_cores

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="control groups are Linux's")


def cores(tmp_path: Path, membership: str, quotas: dict[str, str]) -> int:
    """Lay out control groups as the kernel does and ask for the cores."""
    root = tmp_path / "cgroup"
    root.mkdir()
    for file, content in quotas.items():
        path = root / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="ascii")
    process = tmp_path / "membership"
    process.write_text(membership, encoding="ascii")
    return available_cores(cgroup_root=root, process_cgroup=process)


ALL = len(os.sched_getaffinity(0)) if sys.platform == "linux" else 0


@pytest.mark.parametrize(
    ("membership", "quotas", "expected"),
    [
        ("0::/a/b\n", {}, ALL),
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000\n"}, ALL),
        ("0::/a/b\n", {"a/b/cpu.max": "100000 100000\n"}, 1),
        ("0::/a/b\n", {"a/cpu.max": "50000 100000\n", "a/b/cpu.max": "max 100000\n"}, 1),
        ("0::/\n", {"cpu.max": "100000 100000\n"}, 1),
        ("0::/a\n", {"a/cpu.max": "100001 100000\n"}, min(2, ALL)),
        ("0::/a\n", {"a/cpu.max": "90000000 100000\n"}, ALL),
        (
            "4:cpu,cpuacct:/a\n",
            {
                "cpu,cpuacct/a/cpu.cfs_quota_us": "100000\n",
                "cpu,cpuacct/a/cpu.cfs_period_us": "100000\n",
            },
            1,
        ),
        (
            "4:cpu,cpuacct:/a\n",
            {
                "cpu,cpuacct/a/cpu.cfs_quota_us": "-1\n",
                "cpu,cpuacct/a/cpu.cfs_period_us": "100000\n",
            },
            ALL,
        ),
        ("5:memory:/a\n", {"memory/a/cpu.max": "100000 100000\n"}, ALL),
        ("0::/a\n", {"a/cpu.max": "100000 0\n"}, ALL),
        ("", {}, ALL),
    ],
)
def test_the_tightest_limit_counts(
    tmp_path: Path, membership: str, quotas: dict[str, str], expected: int
) -> None:
    """Quotas of both control-group versions bind, those of groups above too."""
    assert cores(tmp_path, membership, quotas) == expected


def test_without_control_groups_affinity_counts(tmp_path: Path) -> None:
    """Where no control-group file can be read, the affinity alone decides."""
    absent = tmp_path / "absent"
    assert available_cores(cgroup_root=absent, process_cgroup=absent) == ALL
