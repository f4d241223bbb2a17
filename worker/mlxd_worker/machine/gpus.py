"""How many GPUs there are, asked without CUDA: which of them it sees may still be chosen."""

from __future__ import annotations

import ctypes
from typing import Final

NVML: Final = "libnvidia-ml.so.1"


def count_gpus() -> int | None:
    """Return how many GPUs NVIDIA's driver has; None: it does not say."""
    try:
        nvml = ctypes.CDLL(NVML)
        if nvml.nvmlInit_v2():
            return None
        try:
            count = ctypes.c_uint()
            return None if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) else count.value
        finally:
            nvml.nvmlShutdown()
    except (OSError, AttributeError):
        return None
