"""Rows times a matrix, with what stands after it, by Hopper's tensor cores: on CUDA.

MLX has each product's descriptors made and its algorithm looked for anew in every pass, which takes
a GPU's host longer than a small model's product takes the device (decision 0113).

Invariants:
- A row's result is the same to the bit, whatever rows stand beside it and however the work is cut:
  the order of additions follows from the matrix alone. A single row's kernel (`vector`) has another
  one.
- Sums are float32; gate and up are rounded before they meet, as the separate operations round them.
"""

from __future__ import annotations

from functools import cache
from typing import Final

import mlx.core as mx

from mlxd_shared.domain.fast_paths import FastPath
from mlxd_worker.kernels.device import HALVES, Kernel, runs_cuda
from mlxd_worker.kernels.nvrtc import HOPPER, Device, find_compiler, find_device
from mlxd_worker.kernels.own import Body, OwnKernel
from mlxd_worker.kernels.products_source import (
    HEADER,
    OUTPUTS,
    ROWS,
    STAGE,
    TEXT,
    THREADS,
    shared_nbytes,
)
from mlxd_worker.kernels.switches import SWITCHES

ROWS_MAX: Final = 256
"""More rows are work enough for the device that a host's launch does not matter."""

NBYTES_MAX: Final = 16 << 20
"""Larger matrices take the device longer to read than the host takes to launch a product."""

BLOCKS_MIN: Final = 96
"""With fewer blocks too many of an H200's 132 processors would have none."""


def serves(rows: mx.array, matrix: mx.array) -> bool:
    """Return whether `rows_times` can do this here, and should."""
    return runs_here() and is_served(rows, matrix)


def runs_here() -> bool:
    """Return whether `rows_times` may be called at all in this process."""
    return SWITCHES.is_on(FastPath.ROWS_KERNEL) and runs_cuda() and _is_able()


def own_nbytes_max() -> int:
    """Return up to how many bytes a matrix is multiplied by `rows_times` here; 0: none is.

    For a process that computes on a CUDA device; it runs nothing there.
    """
    return NBYTES_MAX if SWITCHES.is_on(FastPath.ROWS_KERNEL) and _is_able() else 0


@cache
def _is_able() -> bool:
    device = find_device()
    return device is not None and runs_on(device) and find_compiler() is not None


def runs_on(device: Device) -> bool:
    """Return whether a device has the instruction, and the memory for it. Pure."""
    return device.capability == HOPPER and shared_nbytes(max(ROWS)) <= device.shared_nbytes


def is_served(rows: mx.array, matrix: mx.array) -> bool:
    """Return whether `rows_times` serves such rows and such a matrix. Pure."""
    outputs, inputs = matrix.shape
    flat = rows.ndim == 2 and rows.shape[1] == inputs
    fits = flat and outputs % OUTPUTS == 0 and inputs % STAGE == 0
    few = 1 < rows.shape[0] <= ROWS_MAX and matrix.nbytes <= NBYTES_MAX
    return fits and few and matrix.dtype in HALVES and rows.dtype == matrix.dtype


def rows_times(
    rows: mx.array,
    matrix: mx.array,
    *,
    residual: mx.array | None = None,
    gated: bool = False,
    wide: bool = False,
    kernel: Kernel | None = None,
) -> mx.array:
    """Return rows [M, K] times `matrix`^T as [M, N]; lazy.

    matrix: [N, K], of the rows' type. residual: [M, N], added. gated: the matrix is [2 N, K], and
    the result `silu(first half) * second half`. wide: the result is float32. kernel: what is
    launched; None: this process's.
    """
    count, inputs = rows.shape
    outputs, tiles = matrix.shape[0], matrix.shape[0] // OUTPUTS
    outputs = outputs // 2 if gated else outputs
    assert residual is None or (residual.shape, residual.dtype) == ((count, outputs), rows.dtype)
    block_rows = block_rows_of(count, tiles)
    arrays = [rows, matrix] if residual is None else [rows, matrix, residual]
    kind = mx.float32 if wide else rows.dtype
    (result,) = (kernel or _kernel(added=residual is not None))(
        inputs=arrays,
        output_shapes=[(count, outputs)],
        output_dtypes=[kind],
        grid=(tiles * THREADS, -(-count // block_rows), 1),
        threadgroup=(THREADS, 1, 1),
        shared_memory=shared_nbytes(block_rows),
        template=[
            ("T", rows.dtype),
            ("OUT", kind),
            ("ADDED", residual is not None),
            ("GATED", gated),
            ("ROWS", block_rows),
        ],
        scalars=[count, outputs, inputs],
    )
    return result


@cache
def block_rows_of(rows: int, tiles: int) -> int:
    """Return how many rows a block has: as many as leave enough blocks, and no more than needed.

    tiles: blocks side by side, of the outputs. Pure.
    """
    most = next((size for size in ROWS if rows <= size), max(ROWS))
    enough = (size for size in reversed(ROWS) if tiles * -(-rows // size) >= BLOCKS_MIN)
    return min(most, next(enough, min(ROWS)))


@cache
def _kernel(*, added: bool) -> OwnKernel:
    names = ("input", "matrix", "residual") if added else ("input", "matrix")
    text = TEXT if added else f"const T* residual = nullptr;\n{TEXT}"
    scalars = ("rows", "outputs", "inputs")
    return OwnKernel(Body("rows_times", names, ("out",), text, HEADER, scalars, THREADS))
