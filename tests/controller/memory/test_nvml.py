"""The driver's library as it is called by ctypes, with the figures of a machine with two H200."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import c_int, c_uint, c_void_p

import pytest

from mlxd_controller.memory.nvml import SIGNATURES, GpuUse, Memory, Nvml, ProcessInfo

FIRST = "GPU-6bee2bb7-44a4-97a1-ae8d-9c873cd740c5"
SECOND = "GPU-2a79f0aa-ab44-613a-165c-4374595a54c1"
TOTAL, FREE = 150_754_820_096, 150_109_880_320
PID, HELD, FREE_BESIDE = 616, 1_616_904_192, 148_483_735_552
"""A process that had allocated 1 GiB on the second GPU: 518 MiB more are CUDA's own."""
NOT_FOUND, TOO_SMALL = 6, 7
UNKNOWN = (1 << 64) - 1


class Driver:
    """Answers as that machine's driver did; `refuses` are functions that fail, and how."""

    def __init__(self, refuses: dict[str, int] | None = None, *, held: int = HELD) -> None:
        self._refuses = refuses or {}
        self._held = held

    def functions(self) -> dict[str, Callable[..., int]]:
        """Return real C functions, which are called as the library's are."""
        answers: dict[str, Callable[..., int]] = {
            "nvmlInit_v2": lambda: 0,
            "nvmlDeviceGetHandleByUUID": self._handle,
            "nvmlDeviceGetMemoryInfo": self._memory,
            "nvmlDeviceGetComputeRunningProcesses_v3": self._processes,
        }
        return {
            name: ctypes.CFUNCTYPE(c_int, *arguments)(self._answer(name, answers[name]))
            for name, arguments in SIGNATURES.items()
        }

    def _answer(self, name: str, answer: Callable[..., int]) -> Callable[..., int]:
        code = self._refuses.get(name)
        return answer if code is None else lambda *_: code

    def _handle(self, gpu_id: bytes, handle: ctypes._Pointer[c_void_p]) -> int:
        known = {FIRST.encode(): 1, SECOND.encode(): 2}
        if gpu_id not in known:
            return NOT_FOUND
        handle[0] = c_void_p(known[gpu_id])
        return 0

    def _memory(self, handle: int, memory: ctypes._Pointer[Memory]) -> int:
        free = FREE if handle == 1 else FREE_BESIDE
        memory[0] = Memory(TOTAL, free, TOTAL - free)
        return 0

    def _processes(
        self,
        handle: int,
        count: ctypes._Pointer[c_uint],
        processes: ctypes._Pointer[ProcessInfo],
    ) -> int:
        found = [] if handle == 1 else [ProcessInfo(PID, self._held, 0xFFFFFFFF, 0xFFFFFFFF)]
        assert count[0] >= len(found)
        for place, process in enumerate(found):
            processes[place] = process
        count[0] = len(found)
        return 0


def test_a_gpu_is_asked_by_its_id_for_what_is_free_and_who_holds_the_rest() -> None:
    """Each answer is of the GPU that was meant, with what each process holds of it."""
    nvml = Nvml(Driver().functions())

    assert nvml.read(FIRST) == GpuUse(FREE, {})
    assert nvml.read(SECOND) == GpuUse(FREE_BESIDE, {PID: HELD})
    assert nvml.read(SECOND) == nvml.read(SECOND)


def test_what_the_driver_does_not_tell_is_not_guessed() -> None:
    """An unknown GPU, a question that fails, and a process without a figure."""
    assert Nvml(Driver().functions()).read("GPU-0") is None
    for name in SIGNATURES.keys() - {"nvmlInit_v2"}:
        assert Nvml(Driver({name: TOO_SMALL}).functions()).read(SECOND) is None
    assert Nvml(Driver(held=UNKNOWN).functions()).read(SECOND) == GpuUse(FREE_BESIDE, {})


def test_a_driver_that_does_not_start_is_none() -> None:
    """The library is there, but no driver behind it."""
    with pytest.raises(OSError, match="does not start"):
        Nvml(Driver({"nvmlInit_v2": 9}).functions())


def test_the_structures_are_laid_out_as_the_drivers() -> None:
    """Sizes as in its header: 24 bytes each."""
    assert (ctypes.sizeof(Memory), ctypes.sizeof(ProcessInfo)) == (24, 24)
