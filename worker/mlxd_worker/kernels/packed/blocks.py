"""Many rows times a matrix that is packed in 4 bits, by Hopper's tensor cores: on CUDA.

`packed_rows` copies the rows anew for every 32 to 128 outputs and unpacks each weight once for 64
rows, or for 32. Here they are copied for 256 outputs, a weight is unpacked once for 128 rows, and
the tensor cores read the rows from shared memory themselves, after a launch that lays them out.

Invariants:
- Integers become numbers of the rows' type, rounded once; sums are float32.
- A row's result is the same to the bit, whatever rows stand beside it here: the order of additions
  follows from the matrix alone. It is another order than that of `packed_rows`.
"""

from __future__ import annotations

from functools import cache
from typing import Final

import mlx.core as mx

from mlxd_worker.kernels.device import Kernel
from mlxd_worker.kernels.nvrtc import HOPPER, Device
from mlxd_worker.kernels.own import Body, OwnKernel
from mlxd_worker.kernels.packed.blocks_source import (
    ADD_TEXT,
    ARRANGE_TEXT,
    ARRANGE_THREADS,
    ARRANGE_VALUES,
    HEADER,
    OUTPUTS,
    ROWS,
    STEP,
    STORING,
    TEXT,
    THREADS,
    shared_nbytes,
)
from mlxd_worker.kernels.packed.rows import PackedMatrix
from mlxd_worker.kernels.packed.rows_source import HEADER as UNPACKING

ROWS_MIN: Final = 33
"""Fewer rows are multiplied faster by `packed_rows`."""

STAGE: Final = 2 * STEP
"""Inputs that a block has at least, or a multiple of it: less was not tried."""

BLOCKS_MAX: Final = 132
"""What a device computes at once: an H200's processors have a block each."""

PARTS: Final = (8, 4, 2)
"""In how many parts the inputs may be divided, where outputs alone are too few blocks."""

ADD_THREADS: Final = 256
ADD_VALUES: Final = 4
"""Of a thread that adds parts."""


def serves_many(matrix: PackedMatrix, device: Device) -> bool:
    """Return whether `packed_blocks_times` can do this.

    matrix: such that `packed_rows_times` can (`rows.serves_matrix`).
    """
    outputs, inputs = matrix.shape
    if device.capability != HOPPER or shared_nbytes(max(ROWS)) > device.shared_nbytes:
        return False
    return inputs % STAGE == 0 and outputs % ADD_VALUES == 0 and outputs >= OUTPUTS


def packed_blocks_times(
    rows: mx.array,
    matrix: PackedMatrix,
    *,
    kernel: Kernel | None = None,
    arranging: Kernel | None = None,
    adding: Kernel | None = None,
) -> mx.array:
    """Return rows [M, K] times the transpose of a packed matrix [N, K], as [M, N]; lazy.

    kernel, arranging, adding: what is launched; None: this process's.
    """
    count, inputs = rows.shape
    outputs = matrix.words.shape[0]
    parts = parts_of(outputs, inputs)
    block_rows = next((size for size in ROWS if count <= size), max(ROWS))
    shape = (count, outputs)
    tiles = _arrange(rows, block_rows, arranging or _arranging())
    (result,) = (kernel or _kernel())(
        inputs=[tiles, matrix.words, matrix.scales, matrix.offsets],
        output_shapes=[shape if parts == 1 else (parts, *shape)],
        output_dtypes=[rows.dtype if parts == 1 else mx.float32],
        grid=(-(-outputs // OUTPUTS) * THREADS, -(-count // block_rows), parts),
        threadgroup=(THREADS, 1, 1),
        shared_memory=shared_nbytes(block_rows),
        template=[
            ("T", rows.dtype),
            ("K", inputs),
            ("N", outputs),
            ("GROUP", matrix.group_size),
            ("PARTS", parts),
            ("ROWS", block_rows),
        ],
        scalars=[count],
    )
    if parts == 1:
        return result
    threads = count * outputs // ADD_VALUES
    (added,) = (adding or _adding())(
        inputs=[result],
        output_shapes=[shape],
        output_dtypes=[rows.dtype],
        grid=(-(-threads // ADD_THREADS) * ADD_THREADS, 1, 1),
        threadgroup=(ADD_THREADS, 1, 1),
        template=[("PARTS", parts)],
        scalars=[count * outputs],
    )
    return added


def _arrange(rows: mx.array, block_rows: int, kernel: Kernel) -> mx.array:
    """Return rows [M, K] as blocks read them: whole blocks, whose end may be undefined."""
    count, inputs = rows.shape
    threads = count * inputs // ARRANGE_VALUES
    (tiles,) = kernel(
        inputs=[rows],
        output_shapes=[(-(-count // block_rows) * block_rows, inputs)],
        output_dtypes=[rows.dtype],
        grid=(-(-threads // ARRANGE_THREADS) * ARRANGE_THREADS, 1, 1),
        threadgroup=(ARRANGE_THREADS, 1, 1),
        template=[("T", rows.dtype), ("K", inputs), ("ROWS", block_rows)],
        scalars=[count],
    )
    return tiles


@cache
def parts_of(outputs: int, inputs: int) -> int:
    """Return in how many parts a matrix's inputs are divided: as many as run at once."""
    blocks = -(-outputs // OUTPUTS)
    stages = inputs // STAGE
    fitting = (parts for parts in PARTS if blocks * parts <= BLOCKS_MAX and stages % parts == 0)
    return next(fitting, 1)


@cache
def _kernel() -> OwnKernel:
    inputs = ("tiles", "words", "scales", "offsets")
    return OwnKernel(
        Body("packed_blocks", inputs, ("out",), TEXT, UNPACKING + HEADER, ("rows",), THREADS)
    )


@cache
def _arranging() -> OwnKernel:
    return OwnKernel(Body("arrange_rows", ("input",), ("out",), ARRANGE_TEXT, "", ("rows",)))


@cache
def _adding() -> OwnKernel:
    return OwnKernel(Body("add_parts", ("parts",), ("out",), ADD_TEXT, STORING, ("count",)))
