"""Few rows times a matrix that is packed in 4 bits, by tensor cores: on CUDA.

MLX 0.32.4 multiplies several rows with a packed matrix at a fraction of the memory's speed: at 8
rows more slowly than with the unpacked one, which has four times the bytes.

Invariants:
- Integers become numbers of the rows' type, rounded once; sums are float32.
- A row's result is the same to the bit, whatever rows stand beside it: the order of additions
  follows from the matrix alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Final

import mlx.core as mx

from mlxd_shared.domain.fast_paths import FastPath
from mlxd_worker.kernels.device import HALVES, Kernel, runs_cuda
from mlxd_worker.kernels.nvrtc import Device, find_compiler, find_device
from mlxd_worker.kernels.own import Body, OwnKernel
from mlxd_worker.kernels.packed.rows_source import HEADER, TEXT
from mlxd_worker.kernels.switches import SWITCHES

BITS: Final = 4
WORD_VALUES: Final = 32 // BITS
"""Integers of a word."""
GROUP_SIZES: Final = (32, 64, 128)
"""How many integers share a scale: what one thread has of a step lies in one group."""

STEP: Final = 128
"""Inputs that a warp multiplies at once."""

INPUTS_MULTIPLE: Final = 2 * STEP
"""At least two warps divide the inputs: with more outputs a block had too few rows to copy."""

STEPS_HELD: Final = 2
"""Steps of each split whose rows are in shared memory: the one at hand, and the next."""

MANY_OUTPUTS: Final = 16384
"""From so many on there are blocks enough for the whole device, whatever each of them has."""

WIDE_INPUTS: Final = 8192
"""From so many on, with few outputs, a block's warps divide the inputs alone."""

TILE_ROWS: Final = 8
TILES: Final = (1, 2, 4, 8)
"""Tiles of rows that a block may have; more rows are several blocks'."""

STRIP_OUTPUTS: Final = 16
CAPABILITY_MIN: Final = 80
"""Devices of compute capability 8.0 multiply bfloat16 on tensor cores, and load past a thread."""


@dataclass(frozen=True, slots=True)
class Tiling:
    """How the work is cut, by the matrix alone."""

    strips: int
    """Strips of 16 outputs that a warp has."""
    warps: int
    """Warps of a block that have outputs of their own."""
    splits: int
    """Warps that divide the inputs of the same outputs."""

    @property
    def outputs(self) -> int:
        """Outputs of a block."""
        return STRIP_OUTPUTS * self.strips * self.warps

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 32 * self.warps * self.splits

    def shared_nbytes(self, tiles: int) -> int:
        """Return the shared memory of a block with so many tiles of rows."""
        rows = TILE_ROWS * tiles
        staged = STEPS_HELD * rows * STEP * self.splits * 2
        met = self.splits * self.outputs * (rows + 1) * 4
        return max(staged, met)


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """Integers of 4 bits, as MLX packs them."""

    words: mx.array
    """uint32 [N, K / 8]."""
    scales: mx.array
    """[N, K / group_size]."""
    offsets: mx.array
    """The same shape and type."""
    group_size: int

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""
        outputs, words = self.words.shape
        return outputs, words * WORD_VALUES


@cache
def device_here() -> Device | None:
    """Return the device that computes; None without CUDA, or a compiler of our own for it."""
    return find_device() if runs_cuda() and find_compiler() is not None else None


def serves(rows: mx.array, matrix: PackedMatrix, device: Device | None = None) -> bool:
    """Return whether `packed_rows_times` can do this, on the device that computes if none is given.

    Otherwise MLX's own product does.
    """
    device = device or device_here()
    plain = rows.ndim == 2 and rows.dtype == matrix.scales.dtype
    return plain and device is not None and serves_matrix(matrix, device)


def serves_matrix(matrix: PackedMatrix, device: Device) -> bool:
    """Return whether `packed_rows_times` can multiply rows of a matrix's own type with it."""
    dtype = matrix.scales.dtype
    if not SWITCHES.is_on(FastPath.PACKED_ROWS) or dtype not in HALVES:
        return False
    plain = matrix.words.ndim == 2 and matrix.group_size in GROUP_SIZES
    if device.capability < CAPABILITY_MIN or not plain or matrix.offsets.dtype != dtype:
        return False
    outputs, inputs = matrix.shape
    cut = tiling(outputs, inputs)
    whole = inputs % INPUTS_MULTIPLE == 0 and outputs >= cut.outputs
    return whole and cut.shared_nbytes(1) <= device.shared_nbytes


def packed_rows_times(
    rows: mx.array,
    matrix: PackedMatrix,
    *,
    device: Device | None = None,
    kernel: Kernel | None = None,
) -> mx.array:
    """Return rows [M, K] times the transpose of a packed matrix [N, K], as [M, N]; lazy.

    device, kernel: as in `serves`, and what is launched; None: those of this process.
    """
    device = device or device_here()
    assert device is not None, "whoever calls this has asked whether it serves"
    count, inputs = rows.shape
    outputs = matrix.words.shape[0]
    cut = tiling(outputs, inputs)
    tiles = tiles_for(count, cut, device.shared_nbytes)
    (result,) = (kernel or _kernel())(
        inputs=[rows, matrix.words, matrix.scales, matrix.offsets],
        output_shapes=[(count, outputs)],
        output_dtypes=[rows.dtype],
        grid=(-(-outputs // cut.outputs) * cut.threads, -(-count // (tiles * TILE_ROWS)), 1),
        threadgroup=(cut.threads, 1, 1),
        shared_memory=cut.shared_nbytes(tiles),
        template=[
            ("T", rows.dtype),
            ("K", inputs),
            ("N", outputs),
            ("GROUP", matrix.group_size),
            ("TILES", tiles),
            ("STRIPS", cut.strips),
            ("WARPS", cut.warps),
            ("SPLITS", cut.splits),
        ],
        scalars=[count],
    )
    return result


@cache
def tiling(outputs: int, inputs: int) -> Tiling:
    """Return how a matrix [outputs, inputs] is cut: what was fastest on an H200."""
    if outputs >= MANY_OUTPUTS:
        return Tiling(strips=2, warps=4, splits=2)
    if inputs >= WIDE_INPUTS:
        cut = Tiling(strips=2, warps=1, splits=8)
    else:
        cut = Tiling(strips=1, warps=2, splits=4)
    while inputs // STEP % cut.splits:
        cut = replace(cut, warps=cut.warps * 2, splits=cut.splits // 2)
    return cut


def tiles_for(rows: int, cut: Tiling, shared_nbytes: int) -> int:
    """Return how many tiles of rows a block has: all of them, or as many as its memory holds."""
    fitting = [tiles for tiles in TILES if cut.shared_nbytes(tiles) <= shared_nbytes]
    return next((tiles for tiles in fitting if rows <= tiles * TILE_ROWS), fitting[-1])


@cache
def _kernel() -> OwnKernel:
    inputs = ("input", "words", "scales", "offsets")
    return OwnKernel(Body("packed_rows", inputs, ("out",), TEXT, HEADER, ("rows",)))
