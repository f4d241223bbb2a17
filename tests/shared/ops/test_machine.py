"""Which machine a process is on, as it says itself."""

from __future__ import annotations

import subprocess
import sys

from mlxd_shared.ops.machine import memory_of, this_machine

TELL = "from mlxd_shared.ops.machine import this_machine as t; print(t().id, t().name)"


def test_processes_of_one_machine_say_one_id() -> None:
    """Another process here says the same; and it is no mere name, which others may have too."""
    mine = this_machine()
    said = subprocess.run([sys.executable, "-c", TELL], capture_output=True, text=True, check=True)
    assert said.stdout.split() == [mine.id, mine.name]
    assert mine.id != mine.name


def test_a_given_name_is_what_processes_agree_by() -> None:
    """Where containers are machines, or two machines were started from one image."""
    assert (this_machine("node-7").id, this_machine("node-7").name) == ("node-7", "node-7")


def test_memory_is_said_with_its_machine() -> None:
    """All of it, what is free, and the part that is ours."""
    memory = memory_of(this_machine("node-7"), resident_nbytes=5)
    assert (memory.machine, memory.machine_id, memory.resident_nbytes) == ("node-7", "node-7", 5)
    assert memory.total_nbytes > memory.available_nbytes > 0
    assert not memory.lost
