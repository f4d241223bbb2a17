"""What GPUs hold at this moment, and for which processes: the driver's own library, by ctypes.

Invariants:
- A question takes microseconds: nothing is started, read from disk or waited for.
- What the library cannot say is None, never a guess.
- Nothing of CUDA is touched: this process takes no memory of any GPU.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from ctypes import POINTER, Structure, byref, c_char_p, c_int, c_uint, c_ulonglong, c_void_p
from dataclasses import dataclass
from typing import Any

from mlxd_shared.ops.logs import get_logger

LIBRARY = "libnvidia-ml.so.1"
PROCESSES_MAX = 1024
"""More than hold memory of one GPU; where there are more, the library says so and tells none."""
_SUCCESS = 0
_UNKNOWN_BYTES = (1 << 64) - 1
_log = get_logger("device")


class Memory(Structure):
    """nvmlMemory_t."""

    _fields_ = (("total", c_ulonglong), ("free", c_ulonglong), ("used", c_ulonglong))


class ProcessInfo(Structure):
    """nvmlProcessInfo_t, as of the functions that end in _v3."""

    _fields_ = (
        ("pid", c_uint),
        ("used", c_ulonglong),
        ("gpu_instance", c_uint),
        ("compute_instance", c_uint),
    )


SIGNATURES: Mapping[str, tuple[Any, ...]] = {
    "nvmlInit_v2": (),
    "nvmlDeviceGetHandleByUUID": (c_char_p, POINTER(c_void_p)),
    "nvmlDeviceGetMemoryInfo": (c_void_p, POINTER(Memory)),
    "nvmlDeviceGetComputeRunningProcesses_v3": (
        c_void_p,
        POINTER(c_uint),
        POINTER(ProcessInfo),
    ),
}
"""The functions that are used: what they take. Each returns 0, or why not."""


@dataclass(frozen=True, slots=True)
class GpuUse:
    """One GPU at one moment: `held` is what each process holds, by its id as the driver sees it."""

    free_bytes: int
    held: Mapping[int, int]


class Nvml:
    """Answers for GPUs by their ids."""

    def __init__(self, functions: Mapping[str, Callable[..., int]]) -> None:
        """Begin with these functions, by the names of SIGNATURES.

        Raises:
            OSError: the library does not start.
        """
        self._functions = functions
        self._handles: dict[str, c_void_p] = {}
        if functions["nvmlInit_v2"]() != _SUCCESS:
            raise OSError("NVML does not start")

    def read(self, gpu_id: str) -> GpuUse | None:
        """Return what a GPU holds now; None where the driver does not tell."""
        handle = self._handle(gpu_id)
        if handle is None:
            return None
        # Processes first: what is taken between the two questions then counts as somebody else's.
        count = c_uint(PROCESSES_MAX)
        processes = (ProcessInfo * PROCESSES_MAX)()
        memory = Memory()
        said = (
            self._ask("nvmlDeviceGetComputeRunningProcesses_v3", handle, byref(count), processes),
            self._ask("nvmlDeviceGetMemoryInfo", handle, byref(memory)),
        )
        if not all(said):
            return None
        held = {p.pid: p.used for p in processes[: count.value] if p.used != _UNKNOWN_BYTES}
        return GpuUse(int(memory.free), held)

    def _handle(self, gpu_id: str) -> c_void_p | None:
        if gpu_id not in self._handles:
            handle = c_void_p()
            if not self._ask("nvmlDeviceGetHandleByUUID", gpu_id.encode(), byref(handle)):
                return None
            self._handles[gpu_id] = handle
        return self._handles[gpu_id]

    def _ask(self, name: str, *arguments: object) -> bool:
        code = self._functions[name](*arguments)
        if code != _SUCCESS:
            _log.debug("NVML does not tell", function=name, code=code)
        return code == _SUCCESS


def open_nvml() -> Nvml | None:
    """Return the library of this machine's driver; None without one that can be asked."""
    try:
        library = ctypes.CDLL(LIBRARY)
        functions = {name: library[name] for name in SIGNATURES}
        for name, arguments in SIGNATURES.items():
            functions[name].argtypes, functions[name].restype = arguments, c_int
        return Nvml(functions)
    except (OSError, AttributeError) as error:
        _log.info("GPUs are measured at the start only", reason=str(error))
        return None
