"""The text of `packed_blocks`: many rows times a matrix of 4 bits, by Hopper's tensor cores.

A block has 256 outputs and up to 128 rows. Each of its four groups of four warps multiplies 64
outputs, whose weights it unpacks into registers, with all rows, which the tensor cores read from
shared memory by themselves (PTX's `wgmma`, with the weights as its first operand). While 256 inputs
are multiplied the next 256 come; the tensor cores see them after a fence, which waits for every
copy under way, so none is under way then.
"""

from typing import Final

from mlxd_worker.kernels.device import COPY_BEHIND

OUTPUTS: Final = 256
"""Outputs of a block."""

THREADS: Final = 512
STEP: Final = 128
STAGE_STEPS: Final = 2
"""Steps of 128 inputs between two waits for what is copied."""

PITCH: Final = 80
"""Bytes from one output's packed weights of a step to the next one's: eight in other banks."""

ALIGNMENT: Final = 1024
"""Where the pattern in which the tensor cores read rows begins anew."""


def shared_nbytes(rows: int) -> int:
    """Return the shared memory of a block with so many rows: two stages of rows and weights."""
    return 2 * STAGE_STEPS * (rows * STEP * 2 + OUTPUTS * PITCH) + ALIGNMENT


def _multiply(kind: str, scalar: str, rows: int) -> str:
    """Return the instruction for a type and a number of rows, as a function."""
    count = rows // 2  # of a thread: 64 outputs and all rows are 128 threads'
    sums = ", ".join(f"%{number}" for number in range(count))
    weights = ", ".join(f"%{count + number}" for number in range(4))
    held = ", ".join(f'"+f"(sums[{number}])' for number in range(count))
    operands = ", ".join(f'"r"(weights[{number}])' for number in range(4))
    return f"""
__device__ __forceinline__ void multiply_64(
    {scalar}, float (&sums)[{count}], const unsigned (&weights)[4], unsigned long long rows) {{
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n{rows}k16.f32.{kind}.{kind} "
      "{{{sums}}}, {{{weights}}}, %{count + 4}, 1, 1, 1, 0;"
      : {held} : {operands}, "l"(rows));
}}
"""


ROWS: Final = (64, 128)
"""Rows that a block may have."""


STORING = """
__device__ __forceinline__ void store(float* place, float value) { *place = value; }
__device__ __forceinline__ void store(__half* place, float value) {
  *place = __float2half_rn(value);
}
__device__ __forceinline__ void store(__nv_bfloat16* place, float value) {
  *place = __float2bfloat16_rn(value);
}
"""

HEADER = (
    STORING
    + "".join(_multiply("bf16", "__nv_bfloat16", rows) for rows in ROWS)
    + "".join(_multiply("f16", "__half", rows) for rows in ROWS)
    + """
// Two neighbouring integers of a word, which are its byte `at`, as numbers, rounded once.
template <typename T>
__device__ __forceinline__ unsigned unpack_pair(
    unsigned word, unsigned at, typename Halves<T>::Pair scale, typename Halves<T>::Pair offset) {
  using Pair = typename Halves<T>::Pair;
  const unsigned twice = __byte_perm(word, 0, at) * 0x1001u;  // the second one sixteen bits higher
  unsigned apart;
  asm("lop3.b32 %0, %1, %2, %3, 0xEA;"  // (twice & 0x000f000f) | ONES
      : "=r"(apart) : "r"(twice), "r"(0x000f000fu), "r"(Halves<T>::ONES));
  const Pair integers = __hsub2(*reinterpret_cast<const Pair*>(&apart), Halves<T>::base());
  const Pair numbers = __hfma2(integers, scale, offset);
  return *reinterpret_cast<const unsigned*>(&numbers);
}
"""
    + COPY_BEHIND
)

TEXT = """
  constexpr int STEP = 128, STEPS = K / STEP / PARTS, BUFFERS = 4;
  constexpr int PITCH = 80, OUTPUTS = 256, SUMS = ROWS / 2;
  constexpr int SLAB = ROWS * 128, ROWS_NBYTES = 2 * SLAB;
  constexpr int STEP_NBYTES = ROWS_NBYTES + OUTPUTS * PITCH;
  constexpr int GROUPS = STEP / GROUP;  // whose scales a step needs
  static_assert(STEPS % 2 == 0, "two steps are a stage");
  using Pair = typename Halves<T>::Pair;
  extern __shared__ unsigned char shared[];
  const unsigned base =
      (static_cast<unsigned>(__cvta_generic_to_shared(shared)) + 1023u) & ~1023u;

  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  const int quad = lane / 4, member = lane % 4;
  const int part = blockIdx.z, first_row = blockIdx.y * ROWS;
  // The last block's outputs end where all do: some are computed twice, and are the same.
  const int first_output = min((int)blockIdx.x * OUTPUTS, N - OUTPUTS);
  const int first_input = part * STEPS * STEP;

  // Rows lie in two slabs of 64 inputs; of each eight rows a row's eighths are exchanged by its
  // number, as the tensor cores read them.
  const int row_copied = thread / 16, eighth = thread % 16;
  const T* rows_from = input + (long long)(first_row + row_copied) * K + first_input + eighth * 8;
  const unsigned rows_to = base + (eighth / 8) * SLAB + row_copied * 128 +
      ((eighth % 8) ^ (row_copied % 8)) * 16;
  const unsigned char* words_from = reinterpret_cast<const unsigned char*>(words) +
      (long long)(first_output + thread / 4) * (K / 2) + first_input / 2 + thread % 4 * 16;
  const unsigned words_to = base + ROWS_NBYTES + thread / 4 * PITCH + thread % 4 * 16;
  const int left = rows - first_row - row_copied;
  auto copy_step = [&](int step) {
    const unsigned place = step % BUFFERS * STEP_NBYTES;
#pragma unroll
    for (int i = 0; i < ROWS / 32; ++i) {
      const bool there = left > i * 32;
      copy_behind(rows_to + place + i * 32 * 128,
                  there ? rows_from + (long long)i * 32 * K + step * STEP : input, there);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      copy_behind(words_to + place + i * 128 * PITCH,
                  words_from + (long long)i * 128 * (K / 2) + step * (STEP / 2), true);
    }
  };

  const int output = first_output + warp * 16 + quad;
  const T* scale_at = scales + (long long)output * (K / GROUP) + first_input / GROUP;
  const T* offset_at = offsets + (long long)output * (K / GROUP) + first_input / GROUP;
  T next_scales[2][GROUPS], next_offsets[2][GROUPS];
  auto load_scales = [&](int step) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int group = 0; group < GROUPS; ++group) {
        const long long at = (long long)half * 8 * (K / GROUP) + step * GROUPS + group;
        next_scales[half][group] = scale_at[at];
        next_offsets[half][group] = offset_at[at];
      }
    }
  };

  float sums[SUMS];
#pragma unroll
  for (int i = 0; i < SUMS; ++i) sums[i] = 0.0f;
  unsigned weights[2][4];
  load_scales(0);
  copy_step(0);
  copy_step(1);
  const unsigned words_at = base + ROWS_NBYTES + (warp * 16 + quad) * PITCH;
  const unsigned byte = 0x4440u | member;

#pragma unroll 1
  for (int step = 0; step < STEPS; ++step) {
    if (step % 2 == 0) {
      asm volatile("cp.async.wait_all;" ::: "memory");
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
      __syncthreads();
      if (step + 2 < STEPS) {
        copy_step(step + 2);
        copy_step(step + 3);
      }
    }
    Pair scale[2][GROUPS], offset[2][GROUPS];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int group = 0; group < GROUPS; ++group) {
        scale[half][group] = Halves<T>::twice(next_scales[half][group]);
        offset[half][group] = Halves<T>::twice(next_offsets[half][group]);
      }
    }
    if (step + 1 < STEPS) load_scales(step + 1);
    const unsigned place = step % BUFFERS * STEP_NBYTES;
    // Eight rows are 1024 bytes; patterns of 128 bytes.
    const unsigned long long described = (((base + place) & 0x3ffffull) >> 4) | (1ull << 16) |
        ((1024ull >> 4) << 32) | (1ull << 62);
#pragma unroll
    for (int vector = 0; vector < 4; ++vector) {
      unsigned packed[2][4];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(packed[half][0]), "=r"(packed[half][1]), "=r"(packed[half][2]),
                       "=r"(packed[half][3])
                     : "r"(words_at + place + half * 8 * PITCH + vector * 16));
      }
#pragma unroll
      for (int of_vector = 0; of_vector < 2; ++of_vector) {
        const int at = vector * 2 + of_vector;  // sixteen inputs
        const int group = at * 16 / GROUP;
        unsigned (&now)[4] = weights[of_vector];
        asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          now[i] = unpack_pair<T>(packed[i % 2][of_vector * 2 + i / 2], byte,
                                  scale[i % 2][group], offset[i % 2][group]);
        }
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
        const unsigned long long rows_there = described + (at / 4 * SLAB + at % 4 * 32) / 16;
        multiply_64(T(), sums, now, rows_there);
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
      }
    }
    // What comes next is copied over what was read here.
    if (step % 2) asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
  }
  // Nobody reads a sum before it is there.
#pragma unroll
  for (int i = 0; i < SUMS; ++i) asm volatile("" : "+f"(sums[i])::"memory");

  auto* target = out + ((long long)part * rows + first_row) * N + output;
#pragma unroll
  for (int i = 0; i < SUMS; ++i) {
    const int row = i / 4 * 8 + member * 2 + i % 2;
    if (first_row + row < rows) store(target + (long long)row * N + i / 2 % 2 * 8, sums[i]);
  }
"""

ADD_TEXT = """
  const int at = (blockIdx.x * 256 + threadIdx.x) * 4;
  if (at >= count) return;
  float4 sum = *reinterpret_cast<const float4*>(parts + at);
#pragma unroll
  for (int part = 1; part < PARTS; ++part) {
    const float4 more = *reinterpret_cast<const float4*>(parts + (long long)part * count + at);
    sum.x += more.x;
    sum.y += more.y;
    sum.z += more.z;
    sum.w += more.w;
  }
  store(out + at, sum.x);
  store(out + at + 1, sum.y);
  store(out + at + 2, sum.z);
  store(out + at + 3, sum.w);
"""
"""Adds what the parts of the inputs came to, always in the same order."""
