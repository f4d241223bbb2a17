"""Who ended a worker: somebody from outside, or the kernel for want of memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlxd_controller.memory.device import VMSTAT, killed_from_outside, oom_kills


def test_the_kernels_own_count_is_read(tmp_path: Path) -> None:
    """One line of many names it; where there is no such file or line, nothing is known."""
    (tmp_path / "vmstat").write_text("nr_free_pages 12\noom_kill 3\nswap_ra 5\n")
    (tmp_path / "older").write_text("nr_free_pages 12\n")

    assert oom_kills(tmp_path / "vmstat") == 3
    assert oom_kills(tmp_path / "older") is None
    assert oom_kills(tmp_path / "missing") is None
    assert VMSTAT.exists() == (oom_kills() is not None)


@pytest.mark.parametrize(
    ("exit_code", "before", "now", "outside"),
    [
        (-9, 3, 3, True),
        (-9, 3, 4, False),
        (-9, None, None, False),
        (-9, None, 4, False),
        (-11, 3, 3, False),
        (1, 3, 3, False),
        (None, 3, 3, False),
    ],
)
def test_only_a_kill_that_memory_does_not_explain_comes_from_outside(
    *, exit_code: int | None, before: int | None, now: int | None, outside: bool
) -> None:
    """SIGKILL, and the kernel has ended nobody since the process began."""
    assert killed_from_outside(exit_code, before=before, now=now) is outside
