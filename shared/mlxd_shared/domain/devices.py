"""What kinds of devices there are, and which backend of MLX runs on which."""

from __future__ import annotations

from enum import StrEnum

CUDA_BACKENDS = ("mlx-cuda-12", "mlx-cuda-13")
"""MLX's distributions for NVIDIA's GPUs."""

JOINT = "+"
"""What stands between the names of a group's devices, one for each rank, in its own."""


class DeviceKind(StrEnum):
    """What runs the products."""

    CPU = "cpu"
    CUDA = "cuda"
    METAL = "metal"

    @property
    def first_name(self) -> str:
        """The default name of a machine's first device of this kind."""
        return "cpu" if self is DeviceKind.CPU else "gpu0"


def kind_of(backend: str) -> DeviceKind:
    """Return the kind of device that MLX uses where this distribution is its backend."""
    if backend == "mlx-cpu":
        return DeviceKind.CPU
    return DeviceKind.CUDA if backend.startswith("mlx-cuda") else DeviceKind.METAL
