"""One row times a matrix, with what stands before and after it: on CUDA, a layer in few kernels.

Invariants:
- A row alone is bound by reading the matrix: each warp reads whole rows of it, in 16-byte loads of
  which eight are under way, and starts before it has normalised its input.
- The norm is reckoned by every block anew: the input is a few kilobytes, and a kernel less.
- Results are rounded where the separate operations round, but for the sum with the residual.
"""

from dataclasses import dataclass
from functools import cache
from typing import cast

import mlx.core as mx

from mlxd_worker.kernels.device import HALVES, WIDEN, Kernel, runs_cuda

LOAD_VALUES = 256
"""Values that a warp loads at once: widths are multiples of it."""

PAIRED_OUTPUTS_MIN = 4096
"""From so many outputs on a warp takes two: there are enough for all warps."""

NORM_WIDTH_MAX = 16384
"""The widest input whose norm a block keeps at hand."""


@dataclass(frozen=True, slots=True)
class Tiling:
    """How the work is cut."""

    outputs: int
    """Outputs that a warp takes at a time."""
    loads: int
    """Loads of each row that are under way."""
    warps: int = 8
    """Warps of a block."""


@dataclass(frozen=True, slots=True)
class Norm:
    """An RMS norm of the input."""

    weight: mx.array
    eps: float


_SOURCE = """
  constexpr int STEPS = K / 256, THREADS = 32 * WARPS, ROWS = GATED ? 2 * OUTS : OUTS;
  constexpr int UNROLLED = 2;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int first = (blockIdx.x * WARPS + warp) * OUTS;
  const uint4* rows[ROWS];
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    const int output = min(first + (GATED ? r / 2 : r), N - 1);
    const long long row = GATED && r % 2 ? (long long)output + N : output;
    rows[r] = reinterpret_cast<const uint4*>(matrix) + row * (K / 8) + lane;
  }
  uint4 now[ROWS][U];
#pragma unroll
  for (int u = 0; u < U; ++u)
#pragma unroll
    for (int r = 0; r < ROWS; ++r) now[r][u] = __ldcs(rows[r] + 32 * u);
  const uint4* given = reinterpret_cast<const uint4*>(input);
  __shared__ uint4 normed[NORMED ? K / 8 : 1];
  if constexpr (NORMED) {
    __shared__ float parts[WARPS];
    float square = 0.0f;
    for (int i = threadIdx.x; i < K / 8; i += THREADS) {
      float x[8];
      widen<T>(given[i], x);
#pragma unroll
      for (int j = 0; j < 8; ++j) square += x[j] * x[j];
    }
#pragma unroll
    for (int far = 16; far; far /= 2) square += __shfl_xor_sync(~0u, square, far);
    if (lane == 0) parts[warp] = square;
    __syncthreads();
    square = 0.0f;
#pragma unroll
    for (int i = 0; i < WARPS; ++i) square += parts[i];
    const float factor = rsqrtf(square / K + EPS_VALUE);
    for (int i = threadIdx.x; i < K / 8; i += THREADS) {
      float x[8], w[8];
      widen<T>(given[i], x);
      widen<T>(reinterpret_cast<const uint4*>(norm)[i], w);
      uint4 packed;
      T* halves = reinterpret_cast<T*>(&packed);
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float one = static_cast<float>(static_cast<T>(x[j] * factor));
        halves[j] = static_cast<T>(w[j] * one);
      }
      normed[i] = packed;
    }
    __syncthreads();
  }
  float sums[ROWS];
#pragma unroll
  for (int r = 0; r < ROWS; ++r) sums[r] = 0.0f;
#pragma unroll UNROLLED
  for (int step = 0; step < STEPS; step += U) {
    uint4 next[ROWS][U];
    if (step + U < STEPS) {
#pragma unroll
      for (int u = 0; u < U; ++u)
#pragma unroll
        for (int r = 0; r < ROWS; ++r) next[r][u] = __ldcs(rows[r] + 32 * (step + U + u));
    }
#pragma unroll
    for (int u = 0; u < U; ++u) {
      const int at = 32 * (step + u) + lane;
      float x[8];
      widen<T>(NORMED ? normed[at] : __ldg(given + at), x);
#pragma unroll
      for (int r = 0; r < ROWS; ++r) {
        float w[8];
        widen<T>(now[r][u], w);
#pragma unroll
        for (int j = 0; j < 8; ++j) sums[r] = fmaf(w[j], x[j], sums[r]);
      }
    }
#pragma unroll
    for (int u = 0; u < U; ++u)
#pragma unroll
      for (int r = 0; r < ROWS; ++r) now[r][u] = next[r][u];
  }
#pragma unroll
  for (int r = 0; r < ROWS; ++r)
#pragma unroll
    for (int far = 16; far; far /= 2) sums[r] += __shfl_xor_sync(~0u, sums[r], far);
  if (lane == 0) {
#pragma unroll
    for (int o = 0; o < OUTS; ++o) {
      if (first + o >= N) break;
      float sum = sums[GATED ? 2 * o : o];
      if constexpr (GATED) {
        const float gate = static_cast<float>(static_cast<T>(sum));
        const float up = static_cast<float>(static_cast<T>(sums[GATED ? 2 * o + 1 : 0]));
        sum = gate / (1.0f + __expf(-gate)) * up;
      }
      if constexpr (ADDED) sum += static_cast<float>(residual[first + o]);
      out[first + o] = static_cast<OUT>(sum);
    }
  }
"""


def serves(rows: mx.array, matrix: mx.array, norm: Norm | None = None) -> bool:
    """Return whether `row_times` can do this."""
    inputs = matrix.shape[1]
    return (
        rows.shape[0] == 1
        and runs_cuda()
        and rows.dtype in HALVES
        and matrix.dtype == rows.dtype
        and inputs % LOAD_VALUES == 0
        and (norm is None or (inputs <= NORM_WIDTH_MAX and norm.weight.dtype == rows.dtype))
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
    `silu(first half) * second half` [1, N]. wide: the result is float32.
    """
    outputs, inputs = matrix.shape
    if gated:
        outputs //= 2
    cut = _tiling(outputs, inputs, gated=gated)
    blocks = -(-outputs // (cut.warps * cut.outputs))
    threads = 32 * cut.warps
    kernel = _kernel(
        normed=norm is not None,
        added=residual is not None,
        eps=0.0 if norm is None else norm.eps,
    )
    arrays = [row, matrix]
    if norm is not None:
        arrays.append(norm.weight)
    if residual is not None:
        arrays.append(residual)
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
            ("OUTS", cut.outputs),
            ("U", cut.loads),
            ("WARPS", cut.warps),
        ],
    )
    return result


def _tiling(outputs: int, inputs: int, *, gated: bool) -> Tiling:
    steps = inputs // LOAD_VALUES
    loads = next(count for count in (4, 2, 1) if steps % count == 0)
    return Tiling(outputs=1 if gated or outputs < PAIRED_OUTPUTS_MIN else 2, loads=loads)


@cache
def _kernel(*, normed: bool, added: bool, eps: float) -> Kernel:
    optional = {"norm": normed, "residual": added}
    names = ["input", "matrix", *(name for name, given in optional.items() if given)]
    absent = [name for name, given in optional.items() if not given]
    source = "".join(f"const T* {name} = nullptr;\n" for name in absent) + _SOURCE
    source = source.replace("EPS_VALUE", f"{eps:.9e}f")
    made = mx.fast.cuda_kernel(
        name="row_times",
        input_names=names,
        output_names=["out"],
        source=source,
        header=WIDEN,
    )
    return cast("Kernel", made)
