"""Values of each row by their indices: what `mx.take_along_axis` does for the draws.

MLX builds its kernel for each pair of types at the first use, from headers that take a GPU's host
three seconds or more; one of our own takes a twentieth of one.
"""

from __future__ import annotations

from functools import cache

import mlx.core as mx

from mlxd_worker.kernels.device import runs_cuda
from mlxd_worker.kernels.nvrtc import find_compiler
from mlxd_worker.kernels.own import TYPES, Body, OwnKernel

THREADS = 128

_PICK = """
  const int row = blockIdx.y, at = blockIdx.x * blockDim.x + threadIdx.x;
  if (at >= count) return;
  picked[row * count + at] = values[(long long)row * width + ids[row * count + at]];
"""


def pick(values: mx.array, ids: mx.array) -> mx.array:
    """Return `values[s, ids[s, k]]`, [S, K], of values [S, V] and ids [S, K] below V; lazy."""
    if not _serves(values, ids):
        return mx.take_along_axis(values, ids, axis=-1)
    (rows, count), width = ids.shape, values.shape[1]
    (picked,) = _kernel()(
        inputs=[values, ids],
        output_shapes=[(rows, count)],
        output_dtypes=[values.dtype],
        grid=(-(-count // THREADS) * THREADS, rows, 1),
        threadgroup=(THREADS, 1, 1),
        template=[],
        scalars=[width, count],
    )
    return picked


def _serves(values: mx.array, ids: mx.array) -> bool:
    fits = values.ndim == ids.ndim == 2 and values.shape[0] == ids.shape[0]
    known = values.dtype in TYPES and ids.dtype in (mx.uint32, mx.int32)
    return fits and known and runs_cuda() and find_compiler() is not None


@cache
def _kernel() -> OwnKernel:
    body = Body("pick", ("values", "ids"), ("picked",), _PICK, scalars=("width", "count"))
    return OwnKernel(body)
