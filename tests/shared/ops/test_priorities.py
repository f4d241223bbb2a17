"""Threads that take what others leave of the processors."""

from __future__ import annotations

import os
import sys
import threading

import pytest

from mlxd_shared.ops.priorities import give_way


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a process has one priority")
def test_one_thread_alone_gives_way() -> None:
    """The process, and the thread that started it, stay as they were."""
    before = os.getpriority(os.PRIO_PROCESS, 0)
    levels: list[int] = []

    def work() -> None:
        give_way(3)
        levels.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()

    assert levels == [min(before + 3, 19)]
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == before
