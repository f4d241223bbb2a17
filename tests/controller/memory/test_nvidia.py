"""GPUs as the driver's library tells of them, with the figures of a machine with two H200."""

from __future__ import annotations

from types import SimpleNamespace

import pynvml
import pytest

from mlxd_controller.memory.nvidia import Gpu, GpuUse, Nvml, open_nvml

FIRST = "GPU-6bee2bb7-44a4-97a1-ae8d-9c873cd740c5"
SECOND = "GPU-2a79f0aa-ab44-613a-165c-4374595a54c1"
TOTAL, FREE = 150_754_820_096, 150_109_880_320
PID, HELD, FREE_BESIDE = 616, 1_616_904_192, 148_483_735_552
"""A process that had allocated 1 GiB on the second GPU: 518 MiB more are CUDA's own."""


class Driver:
    """Answers as that machine's driver did, under pynvml's names; `refuses` are what fails."""

    NVMLError = pynvml.NVMLError

    def __init__(self, *refuses: str, held: int | None = HELD) -> None:
        self._held = held
        for name in refuses:
            setattr(self, name, self._refuse)

    def nvmlInit(self) -> None:  # noqa: N802
        """Start."""

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        """Count the GPUs: the third shares the host's memory."""
        return 3

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:  # noqa: N802
        """Find a GPU by its place."""
        return (FIRST, SECOND, "GPU-shared")[index]

    def nvmlDeviceGetHandleByUUID(self, gpu_id: str) -> str:  # noqa: N802
        """Find a GPU by its id."""
        if gpu_id not in (FIRST, SECOND):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return gpu_id

    def nvmlDeviceGetUUID(self, handle: str) -> str:  # noqa: N802
        """Name the id."""
        return handle

    def nvmlDeviceGetName(self, handle: str) -> str:  # noqa: N802
        """Name the product."""
        return "NVIDIA H200"

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> SimpleNamespace:  # noqa: N802
        """Tell of the memory."""
        if handle not in (FIRST, SECOND):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return SimpleNamespace(total=TOTAL, free=FREE if handle == FIRST else FREE_BESIDE)

    def nvmlDeviceGetComputeRunningProcesses(  # noqa: N802
        self, handle: str
    ) -> list[SimpleNamespace]:
        """Tell who holds how much."""
        return [] if handle == FIRST else [SimpleNamespace(pid=PID, usedGpuMemory=self._held)]

    def _refuse(self, *_: object) -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_UNKNOWN)


def test_a_gpu_is_asked_by_its_id_for_what_is_free_and_who_holds_the_rest() -> None:
    """Each answer is of the GPU that was meant, with what each process holds of it."""
    nvml = Nvml(Driver())

    assert nvml.read(FIRST) == GpuUse(FREE, {})
    assert nvml.read(SECOND) == GpuUse(FREE_BESIDE, {PID: HELD})
    assert nvml.read(SECOND) == nvml.read(SECOND)


def test_gpus_are_listed_by_their_places() -> None:
    """With id, product and memory; one that shares the host's has none of its own to count."""
    assert Nvml(Driver()).gpus() == (
        Gpu(0, FIRST, "NVIDIA H200", TOTAL, FREE),
        Gpu(1, SECOND, "NVIDIA H200", TOTAL, FREE_BESIDE),
    )
    assert Nvml(Driver("nvmlDeviceGetUUID")).gpus() == ()


def test_what_the_driver_does_not_tell_is_not_guessed() -> None:
    """An unknown GPU, a question that fails, and a process without a figure."""
    assert Nvml(Driver()).read("GPU-0") is None
    for name in ("nvmlDeviceGetMemoryInfo", "nvmlDeviceGetComputeRunningProcesses"):
        assert Nvml(Driver(name)).read(SECOND) is None
    assert Nvml(Driver(held=None)).read(SECOND) == GpuUse(FREE_BESIDE, {})


def test_a_driver_that_does_not_start_is_an_error_and_then_none() -> None:
    """The library is there, but no driver behind it."""
    with pytest.raises(pynvml.NVMLError):
        Nvml(Driver("nvmlInit"))
    assert open_nvml(Driver("nvmlInit")) is None
