"""The NVIDIA GPUs of this machine that the controller, and so its workers, may see.

A GPU is identified by the driver's id, which does not depend on how many a process sees, and named
by its index in nvidia-smi: gpu0, gpu1, ... The driver is queried through NVML, which takes
microseconds and no GPU memory. What it does not report is None, never a guess.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mlxd_shared.ops.logs import get_logger

VISIBLE_VARIABLE = "CUDA_VISIBLE_DEVICES"
_log = get_logger("device")


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU as it was at the start, before any worker of this controller ran."""

    index: int
    id: str
    product: str
    total_bytes: int
    free_bytes: int

    @property
    def name(self) -> str:
        """Its name as a device."""
        return f"gpu{self.index}"


@dataclass(frozen=True, slots=True)
class GpuUse:
    """One GPU at one moment: `held` maps process ids, as the driver sees them, to bytes."""

    free_bytes: int
    held: Mapping[int, int]


class Nvml:
    """Queries the GPUs of this machine."""

    def __init__(self, library: Any) -> None:  # noqa: ANN401 - pynvml, which has no types
        """Start the library.

        Raises:
            pynvml.NVMLError: the library or the driver is missing.
        """
        library.nvmlInit()
        self._library = library
        self._handles: dict[str, object] = {}

    def gpus(self) -> tuple[Gpu, ...]:
        """Return each GPU with memory of its own, by index."""
        gpus = map(self._gpu, range(self._library.nvmlDeviceGetCount()))
        return tuple(gpu for gpu in gpus if gpu is not None)

    def read(self, gpu_id: str) -> GpuUse | None:
        """Return what a GPU holds now; None if the driver does not report it."""
        library = self._library
        try:
            if gpu_id not in self._handles:
                self._handles[gpu_id] = library.nvmlDeviceGetHandleByUUID(gpu_id)
            handle = self._handles[gpu_id]
            # Processes first: what is allocated in between then counts as somebody else's.
            processes = library.nvmlDeviceGetComputeRunningProcesses(handle)
            free_bytes = library.nvmlDeviceGetMemoryInfo(handle).free
        except library.NVMLError as error:
            _log.debug("NVML reports nothing", gpu=gpu_id, reason=str(error))
            return None
        held = {p.pid: p.usedGpuMemory for p in processes if p.usedGpuMemory is not None}
        return GpuUse(free_bytes, held)

    def _gpu(self, index: int) -> Gpu | None:
        library = self._library
        try:
            handle = library.nvmlDeviceGetHandleByIndex(index)
            memory = library.nvmlDeviceGetMemoryInfo(handle)
            names = library.nvmlDeviceGetUUID(handle), library.nvmlDeviceGetName(handle)
        except library.NVMLError as error:
            _log.warning("skipping a GPU without figures", index=index, reason=str(error))
            return None
        return Gpu(index, *names, memory.total, memory.free)


def open_nvml(library: Any = None) -> Nvml | None:  # noqa: ANN401 - as above
    """Return this machine's driver; None if there is none to query. Blocks.

    library: replaces pynvml.
    """
    import pynvml  # noqa: PLC0415 - so that nobody pays for it where there is no GPU

    try:
        return Nvml(library or pynvml)
    except pynvml.NVMLError as error:
        _log.info("cannot query the GPU driver", reason=str(error))
        return None


def visible(gpus: tuple[Gpu, ...], setting: str | None) -> tuple[Gpu, ...]:
    """Return the GPUs visible to a process with this CUDA_VISIBLE_DEVICES; None: not set.

    The setting lists indices or ids, which may be shortened. As in CUDA, whatever follows an entry
    that matches no GPU, or a GPU listed before, is invisible.
    """
    if setting is None:
        return gpus
    selected: list[Gpu] = []
    for word in filter(None, (part.strip() for part in setting.split(","))):
        matches = [gpu for gpu in gpus if _means(word, gpu)]
        if len(matches) != 1 or matches[0] in selected:
            _log.warning("later GPUs are invisible", variable=VISIBLE_VARIABLE, word=word)
            break
        selected += matches
    return tuple(selected)


def _means(word: str, gpu: Gpu) -> bool:
    return int(word) == gpu.index if word.isdecimal() else gpu.id.startswith(word)
