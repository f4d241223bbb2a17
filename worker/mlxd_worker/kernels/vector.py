"""One row times a matrix, with what stands before and after it: on CUDA, a layer in few kernels.

Invariants:
- A row alone is bound by reading the matrix, so nothing is waited for before reading begins: not
  the input, nor its norm, whose factor the sums are multiplied by.
- Every block computes the norm anew: the input is a few kilobytes, and a kernel less.
- What is normalised is not rounded before the product; gate and up are, as the separate operations
  round them.
"""

from dataclasses import dataclass
from functools import cache

import mlx.core as mx

from mlxd_shared.domain.fast_paths import FastPath
from mlxd_worker.kernels.device import HALVES, WIDEN, runs_cuda
from mlxd_worker.kernels.own import Body, OwnKernel
from mlxd_worker.kernels.switches import SWITCHES
from mlxd_worker.kernels.vector_source import SHARED_ROWS, WHOLE_ROWS

LOAD_VALUES = 256
"""Values that a warp loads at once: widths are multiples of it."""

SHARED_WIDTH_MAX = 16384
"""The widest input whose parts a block's warps keep in registers."""

WHOLE_WIDTH_MIN = 8193
"""From this width on a warp takes rows of its own, where nothing else is asked for."""

FEW_OUTPUTS = 4096
"""Below this blocks are smallest: there must be enough of them for the whole device."""

MANY_OUTPUTS = 8192
"""From so many on blocks are small too: the last of many end together."""


@dataclass(frozen=True, slots=True)
class Tiling:
    """How the work is cut."""

    rows: int
    """Rows whose loads are under way at once, and as many again: a power of two where shared."""
    loads: int
    """Loads of each of them that a thread has under way."""
    warps: int
    """Warps of a block."""
    groups: int = 0
    """So many times `rows` a block's warps read together; 0: each warp reads `rows` of its own."""

    @property
    def block_rows(self) -> int:
        """Rows that a block reads."""
        return self.rows * (self.groups or self.warps)


@dataclass(frozen=True, slots=True)
class Norm:
    """An RMS norm of the input."""

    weight: mx.array
    eps: float


def serves(rows: mx.array, matrix: mx.array, norm: Norm | None = None) -> bool:
    """Return whether `row_times` can do this, by itself or gated."""
    inputs = matrix.shape[1]
    return (
        rows.shape[0] == 1
        and runs_cuda()
        and SWITCHES.is_on(FastPath.ROW_KERNEL)
        and rows.dtype in HALVES
        and matrix.dtype == rows.dtype
        and inputs % LOAD_VALUES == 0
        and (norm is None or (inputs <= SHARED_WIDTH_MAX and norm.weight.dtype == rows.dtype))
    )


def row_times(
    row: mx.array,
    matrix: mx.array,
    *,
    norm: Norm | None = None,
    residual: mx.array | None = None,
    gated: bool = False,
    wide: bool = False,
) -> mx.array:
    """Return `row` [1, K], normalised where `norm` says so, times `matrix`^T; lazy.

    matrix: [N, K]. residual: [1, N], added. gated: the matrix is [2 N, K], and the result
    `silu(first half) * second half` [1, N]; only with a norm. wide: the result is float32.
    """
    assert norm is not None or not gated, "what is gated is normalised"
    outputs, inputs = matrix.shape
    cut = tiling(outputs, inputs, normed=norm is not None)
    blocks, threads = -(-outputs // cut.block_rows), 32 * cut.warps
    kernel = _kernel(
        normed=norm is not None,
        added=residual is not None,
        shared=cut.groups > 0,
        eps=0.0 if norm is None else norm.eps,
    )
    arrays = [row, matrix]
    if norm is not None:
        arrays.append(norm.weight)
    if residual is not None:
        arrays.append(residual)
    if gated:
        outputs //= 2
    kind = mx.float32 if wide else row.dtype
    (result,) = kernel(
        inputs=arrays,
        output_shapes=[(1, outputs)],
        output_dtypes=[kind],
        grid=(blocks * threads, 1, 1),
        threadgroup=(threads, 1, 1),
        template=[
            ("T", row.dtype),
            ("OUT", kind),
            ("K", inputs),
            ("N", outputs),
            ("NORMED", norm is not None),
            ("ADDED", residual is not None),
            ("GATED", gated),
            ("ROWS", cut.rows),
            ("LOADS", cut.loads),
            ("WARPS", cut.warps),
            ("GROUPS", cut.groups),
        ],
    )
    return result


def tiling(outputs: int, inputs: int, *, normed: bool) -> Tiling:
    """Return how a matrix [outputs, inputs] is cut: what was fastest on an H200."""
    steps = inputs // LOAD_VALUES
    if inputs >= WHOLE_WIDTH_MIN and not normed:
        loads = next(count for count in (4, 2, 1) if steps % count == 0)
        if loads > 1 or inputs > SHARED_WIDTH_MAX:
            return Tiling(rows=2, loads=loads, warps=8)
    loads = next(count for count in (1, 2, 4) if steps <= 8 * count or count == 4)
    few = outputs < FEW_OUTPUTS
    block_rows = 4 if few else 16 if outputs < MANY_OUTPUTS and loads > 1 else 8
    rows = 2 if loads == 4 or (normed and block_rows == 16) else 4
    return Tiling(rows=rows, loads=loads, warps=-(-steps // loads), groups=block_rows // rows)


@cache
def _kernel(*, normed: bool, added: bool, shared: bool, eps: float) -> OwnKernel:
    optional = {"norm": normed, "residual": added}
    names = ["input", "matrix", *(name for name, present in optional.items() if present)]
    absent = [name for name, present in optional.items() if not present]
    source = "".join(f"const T* {name} = nullptr;\n" for name in absent)
    source += SHARED_ROWS if shared else WHOLE_ROWS
    source = source.replace("EPS_VALUE", f"{eps:.9e}f")
    return OwnKernel(Body("row_times", tuple(names), ("out",), source, WIDEN))
