"""What computes here, whether kernels of our own can, and what these have in common.

Invariants:
- A kernel is an alternative to operations that exist: who uses one has them for all other cases.
- Nobody else compares MLX's default device (`tests/worker/kernels/test_device.py`).
"""

from collections.abc import Callable
from functools import cache

import mlx.core as mx

Kernel = Callable[..., list[mx.array]]
"""What MLX makes of a source: called with inputs, shapes and grid, it gives the outputs, lazy."""

HALVES = (mx.bfloat16, mx.float16)
"""What the kernels compute with; sums are float32."""

WIDEN = """
template <typename T>
__device__ __forceinline__ void widen(const uint4& packed, float (&values)[8]) {
  const T* halves = reinterpret_cast<const T*>(&packed);
#pragma unroll
  for (int i = 0; i < 8; ++i) values[i] = static_cast<float>(halves[i]);
}
"""
"""Eight halves, as one thread loads them, to float."""

COPY_BEHIND = """
__device__ __forceinline__ void copy_behind(unsigned target, const void* source, bool there) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
               :: "r"(target), "l"(source), "r"(there ? 16 : 0) : "memory");
}
"""
"""Sixteen bytes into shared memory, which come while others are computed; zeros where none are."""


_CPU = mx.Device(mx.cpu)


def runs_cpu() -> bool:
    """Return whether what this thread computes runs on a CPU."""
    return mx.default_device() == _CPU


@cache
def runs_cuda() -> bool:
    """Return whether this process computes on a CUDA device by default."""
    return bool(mx.cuda.is_available()) and not runs_cpu()
