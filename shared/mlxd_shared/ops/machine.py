"""Which machine this process runs on, and what memory that has.

Invariants:
- Processes that share a memory say one id, in whatever containers they are; others say others. What
  tells it is the kernel's mark of its start, unless a name was given by which they are to agree.
"""

from __future__ import annotations

import ctypes
import platform
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil

from mlxd_shared.domain.figures import HostMemory

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_CPU_INFO = Path("/proc/cpuinfo")
_MAC_BOOT_ID = b"kern.bootsessionuuid"
_MARK_BYTES_MAX = 64


@dataclass(frozen=True, slots=True)
class Machine:
    """One machine: `name` is for people, `id` tells it from all others until its next start."""

    id: str
    name: str


def this_machine(name: str = "") -> Machine:
    """Return the machine of this process; a `name` that was given is its id as well."""
    if name:
        return Machine(name, name)
    host = platform.node() or "localhost"
    return Machine(_mark_of_start() or host, host)


def _mark_of_start() -> str:
    if sys.platform == "darwin":
        size = ctypes.c_size_t(_MARK_BYTES_MAX)
        mark = ctypes.create_string_buffer(_MARK_BYTES_MAX)
        failed = ctypes.CDLL(None).sysctlbyname(_MAC_BOOT_ID, mark, ctypes.byref(size), None, 0)
        return "" if failed else mark.value.decode()
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return ""  # no such file in this sandbox


def processor_name() -> str:
    """Return what the processor calls itself, and how many cores the system sees."""
    try:
        lines = _CPU_INFO.read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    models = [line.split(":", 1)[1].strip() for line in lines if "model name" in line]
    return f"{models[0]}, {len(models)} cores" if models else platform.processor()


def memory_of(machine: Machine, *, resident_nbytes: int) -> HostMemory:
    """Return the memory of this process's machine now; `resident_nbytes` is the part of mlxd."""
    memory = psutil.virtual_memory()
    return HostMemory(
        machine=machine.name,
        machine_id=machine.id,
        total_nbytes=memory.total,
        available_nbytes=memory.available,
        resident_nbytes=resident_nbytes,
    )
