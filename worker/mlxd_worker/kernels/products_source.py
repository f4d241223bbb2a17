"""The text of `products`: rows times a matrix of halves, by Hopper's tensor cores.

A block is one group of four warps. It has 64 outputs of the matrix and `ROWS` rows, both of which
the tensor cores read from shared memory by themselves (PTX's `wgmma`): the matrix is the first
operand, so that a product of few rows wastes nothing. 64 inputs are a stage; while one is
multiplied, those behind it come, and the one before it is still being read.
"""

from typing import Final

from mlxd_worker.kernels.device import COPY_BEHIND

THREADS: Final = 128
OUTPUTS: Final = 64
"""Outputs of a block: what one instruction multiplies."""

STAGE: Final = 64
"""Inputs of a stage: 128 bytes, in which the pattern repeats that the tensor cores read."""

STAGES: Final = 6
"""Stages that shared memory holds: one is read, one may still be, and the others come."""

ALIGNMENT: Final = 1024
"""Where that pattern begins anew: eight rows of a stage."""

ROWS: Final = (16, 32, 64, 128)
"""Rows that a block may have."""


def shared_nbytes(rows: int) -> int:
    """Return the shared memory of a block with so many rows."""
    return STAGES * (OUTPUTS + rows) * STAGE * 2 + ALIGNMENT


def _multiply(kind: str, scalar: str, rows: int) -> str:
    """Return the instruction for a type and a number of rows, as a function."""
    count = rows // 2  # of a thread: 64 outputs and all rows are 128 threads'
    sums = ", ".join(f"%{number}" for number in range(count))
    held = ", ".join(f'"+f"(sums[{number}])' for number in range(count))
    return f"""
__device__ __forceinline__ void multiply(
    {scalar}, float (&sums)[{count}], unsigned long long matrix, unsigned long long rows) {{
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n{rows}k16.f32.{kind}.{kind} "
      "{{{sums}}}, %{count}, %{count + 1}, 1, 1, 1, 0, 0;"
      : {held} : "l"(matrix), "l"(rows));
}}
"""


HEADER: Final = (
    "".join(_multiply("bf16", "__nv_bfloat16", rows) for rows in ROWS)
    + "".join(_multiply("f16", "__half", rows) for rows in ROWS)
    + COPY_BEHIND
)

TEXT: Final = """
  constexpr int STAGE = 64, STAGES = 6, OUTPUTS = 64, SUMS = ROWS / 2;
  constexpr int MATRIX_NBYTES = OUTPUTS * 128, STAGE_NBYTES = MATRIX_NBYTES + ROWS * 128;
  extern __shared__ unsigned char shared[];
  const unsigned base =
      (static_cast<unsigned>(__cvta_generic_to_shared(shared)) + 1023u) & ~1023u;
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  const int first_row = blockIdx.y * ROWS;
  const int stages = inputs / STAGE;

  // Eight threads copy the 128 bytes of a row; of each eight rows a row's eighths are exchanged by
  // its number, as the tensor cores read them.
  const int copied = thread / 8, eighth = thread % 8;
  const unsigned place = copied * 128 + (eighth ^ (copied % 8)) * 16;
  const T* matrix_from[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int at = copied + i * 16;
    // Gated, a thread gets a gate and what it gates: a warp has eight of each.
    const long long row = GATED
        ? (long long)blockIdx.x * 32 + i * 8 + at % 8 + (at / 8 % 2 ? outputs : 0)
        : (long long)blockIdx.x * OUTPUTS + at;
    matrix_from[i] = matrix + row * inputs + eighth * 8;
  }
  const T* rows_from = input + (long long)(first_row + copied) * inputs + eighth * 8;
  const int left = rows - first_row - copied;
  auto copy_stage = [&](int stage) {
    if (stage < stages) {
      const unsigned to = base + stage % STAGES * STAGE_NBYTES + place;
#pragma unroll
      for (int i = 0; i < 4; ++i) copy_behind(to + i * 2048, matrix_from[i] + stage * STAGE, true);
#pragma unroll
      for (int i = 0; i < ROWS / 16; ++i) {
        const bool there = left > i * 16;
        copy_behind(to + MATRIX_NBYTES + i * 2048,
                    there ? rows_from + (long long)i * 16 * inputs + stage * STAGE : input, there);
      }
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
  };

  float sums[SUMS];
#pragma unroll
  for (int i = 0; i < SUMS; ++i) sums[i] = 0.0f;
#pragma unroll
  for (int stage = 0; stage < STAGES - 2; ++stage) copy_stage(stage);
#pragma unroll 1
  for (int stage = 0; stage < stages; ++stage) {
    asm volatile("cp.async.wait_group %0;" :: "n"(STAGES - 3) : "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
    // All warps are done with the stage before the last one.
    copy_stage(stage + STAGES - 2);
    const unsigned here = base + stage % STAGES * STAGE_NBYTES;
    // Eight rows are 1024 bytes; patterns of 128 bytes.
    const unsigned long long form = (1ull << 16) | ((1024ull >> 4) << 32) | (1ull << 62);
    const unsigned long long matrix_there = form | ((here & 0x3ffffull) >> 4);
    const unsigned long long rows_there = form | (((here + MATRIX_NBYTES) & 0x3ffffull) >> 4);
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
    for (int i = 0; i < STAGE / 16; ++i) {
      multiply(T(), sums, matrix_there + 2 * i, rows_there + 2 * i);
    }
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
  }
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
  // Nobody reads a sum before it is there.
#pragma unroll
  for (int i = 0; i < SUMS; ++i) asm volatile("" : "+f"(sums[i])::"memory");

  const int quad = lane / 4, member = lane % 4;
  const int output = GATED ? blockIdx.x * 32 + warp * 8 + quad
                           : blockIdx.x * OUTPUTS + warp * 16 + quad;
#pragma unroll
  for (int i = 0; i < SUMS; ++i) {
    const int row = first_row + i / 4 * 8 + member * 2 + i % 2;
    if (row >= rows || (GATED && i / 2 % 2)) continue;
    const long long at = (long long)row * outputs + output + (GATED ? 0 : i / 2 % 2 * 8);
    float sum = sums[i];
    if constexpr (GATED) {
      const float gate = static_cast<float>(static_cast<T>(sum));
      const float up = static_cast<float>(static_cast<T>(sums[i + 2 < SUMS ? i + 2 : i]));
      sum = gate / (1.0f + __expf(-gate)) * up;
    }
    if constexpr (ADDED) sum += static_cast<float>(residual[at]);
    out[at] = static_cast<OUT>(sum);
  }
"""
