"""The text of `packed_blocks`: many rows times a matrix of 4 bits, by Hopper's tensor cores.

A block has 256 outputs and up to 128 rows. Each of its four groups of four warps multiplies 64
outputs with all rows (PTX's `wgmma`, with the weights as its first operand, from registers), and
goes its own way: it brings its own weights, waits for nobody but who has not read the rows before
the last ones yet, and so unpacks while others multiply. The tensor cores read rows from shared
memory by themselves; there they come 128 inputs at a time by one bulk copy, for which they have
been laid out by a kernel before this one (`ARRANGE_TEXT`).

That also puts a row's inputs into the order in which a thread has their weights. Of 128 inputs one
thread of four has 32 in a row, four words of eight, and what a shift and a mask take from a word
are the integers i and i + 4: the two neighbours of a pair.
"""

from typing import Final

from mlxd_worker.kernels.device import COPY_BEHIND

OUTPUTS: Final = 256
"""Outputs of a block."""

THREADS: Final = 512
STEP: Final = 128
BUFFERS: Final = 4
"""Steps of 128 inputs that shared memory holds: one is multiplied, the next ones come."""

PITCH: Final = 80
"""Bytes from one output's packed weights of a step to the next one's: eight in other banks."""

ALIGNMENT: Final = 1024
"""Where the pattern in which the tensor cores read rows begins anew."""

ARRANGE_THREADS: Final = 256
ARRANGE_VALUES: Final = 8
"""Of a thread that lays rows out: sixteen bytes."""


def shared_nbytes(rows: int) -> int:
    """Return the shared memory of a block with so many rows: some steps of rows and weights."""
    return BUFFERS * (rows * STEP * 2 + OUTPUTS * PITCH) + ALIGNMENT


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

_BARRIERS = """
__device__ __forceinline__ void begin_barrier(unsigned barrier, unsigned arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(barrier), "r"(arrivals));
}
__device__ __forceinline__ void wait_for(unsigned barrier, unsigned parity) {
  asm volatile(
      "{\\n.reg .pred over;\\n"
      "AGAIN:\\nmbarrier.try_wait.parity.shared::cta.b64 over, [%0], %1;\\n"
      "@over bra OVER;\\nbra AGAIN;\\nOVER:\\n}"
      :: "r"(barrier), "r"(parity) : "memory");
}
// Without a branch: products are under way, and those may not cross one.
__device__ __forceinline__ void arrive_if(unsigned barrier, bool arrives) {
  asm volatile(
      "{\\n.reg .pred arrives;\\nsetp.ne.s32 arrives, %1, 0;\\n"
      "@arrives mbarrier.arrive.shared::cta.b64 _, [%0];\\n}"
      :: "r"(barrier), "r"((int)arrives) : "memory");
}
// So many bytes into shared memory by one copy; the barrier's phase ends when they are there.
__device__ __forceinline__ void copy_in_bulk(
    unsigned target, const void* source, unsigned nbytes, unsigned barrier) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
               :: "r"(barrier), "r"(nbytes) : "memory");
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
      :: "r"(target), "l"(source), "r"(nbytes), "r"(barrier) : "memory");
}
"""

HEADER = (
    STORING
    + "".join(_multiply("bf16", "__nv_bfloat16", rows) for rows in ROWS)
    + "".join(_multiply("f16", "__half", rows) for rows in ROWS)
    + _BARRIERS
    + COPY_BEHIND
)

ARRANGE_TEXT = """
  const int at = blockIdx.x * 256 + threadIdx.x;  // of the eights of values
  const int row = at / (K / 8), piece = at % (K / 8);
  if (row >= rows) return;  // what is behind the last row is never given out
  const int step = piece / 16, eighth = piece % 16;
  // Sixteen positions are two pairs of each of four threads.
  const int word = eighth / 4, shift = eighth % 4;
  const T* from = input + (long long)row * K + step * 128 + word * 8 + shift;
  __align__(16) T values[8];
#pragma unroll
  for (int member = 0; member < 4; ++member) {
    values[member * 2] = from[member * 32];
    values[member * 2 + 1] = from[member * 32 + 4];
  }
  // Two slabs of 64 positions; of each eight rows a row's eighths are exchanged by its number.
  const long long place = ((long long)(row / ROWS) * (K / 128) + step) * ROWS * 16 +
      eighth / 8 * ROWS * 8 + row % ROWS * 8 + ((eighth % 8) ^ (row % 8));
  reinterpret_cast<uint4*>(out)[place] = *reinterpret_cast<const uint4*>(values);
"""
"""Lays rows out as `TEXT` reads them: ROWS of them and 128 inputs are one piece."""

TEXT = """
  constexpr int STEP = 128, STEPS = K / STEP / PARTS, BUFFERS = 4;
  constexpr int PITCH = 80, OUTPUTS = 256, SUMS = ROWS / 2, AT_ONCE = ROWS < 128 ? 4 : 8;
  constexpr int SLAB = ROWS * 128, ROWS_NBYTES = 2 * SLAB, WORDS_NBYTES = 64 * PITCH;
  using Pair = typename Halves<T>::Pair;
  extern __shared__ unsigned char shared[];
  __shared__ __align__(8) unsigned long long barriers[2 * BUFFERS];
  const unsigned base =
      (static_cast<unsigned>(__cvta_generic_to_shared(shared)) + 1023u) & ~1023u;
  const unsigned come = static_cast<unsigned>(__cvta_generic_to_shared(barriers));
  const unsigned gone = come + 8 * BUFFERS;

  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  const int quad = lane / 4, member = lane % 4, of_four = thread / 128, own = thread % 128;
  const int part = blockIdx.z, first_row = blockIdx.y * ROWS;
  // The last block's outputs end where all do: some are computed twice, and are the same.
  const int first_output = min((int)blockIdx.x * OUTPUTS, N - OUTPUTS);
  const int first_input = part * STEPS * STEP;
  if (thread == 0) {
#pragma unroll
    for (int i = 0; i < BUFFERS; ++i) {
      begin_barrier(come + 8 * i, 1);
      begin_barrier(gone + 8 * i, 4);
    }
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  }
  __syncthreads();

  const uint4* rows_from = reinterpret_cast<const uint4*>(tiles) +
      ((long long)blockIdx.y * (K / STEP) + first_input / STEP) * (ROWS * 16);
  auto copy_rows = [&](int step) {
    if (thread == 0 && step < STEPS) {
      const int buffer = step % BUFFERS;
      if (step >= BUFFERS) wait_for(gone + 8 * buffer, (step / BUFFERS & 1) ^ 1);
      copy_in_bulk(base + buffer * ROWS_NBYTES, rows_from + (long long)step * (ROWS * 16),
                   ROWS_NBYTES, come + 8 * buffer);
    }
  };
  const unsigned char* words_from = reinterpret_cast<const unsigned char*>(words) +
      (long long)(first_output + of_four * 64 + own / 4) * (K / 2) + first_input / 2 +
      own % 4 * 16;
  const unsigned own_words = base + BUFFERS * (ROWS_NBYTES + of_four * WORDS_NBYTES);
  auto copy_words = [&](int step) {
    if (step < STEPS) {
      const unsigned to = own_words + step % BUFFERS * WORDS_NBYTES + own / 4 * PITCH +
          own % 4 * 16;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        copy_behind(to + i * 32 * PITCH,
                    words_from + (long long)i * 32 * (K / 2) + step * (STEP / 2), true);
      }
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
  };

  const int output = first_output + warp * 16 + quad;
  const long long first_group =
      (long long)output * (K / GROUP) + first_input / GROUP + member * 32 / GROUP;
  T next_scale[2], next_offset[2];
  auto load_scales = [&](int step) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const long long at = first_group + (long long)half * 8 * (K / GROUP) + step * STEP / GROUP;
      next_scale[half] = scales[at];
      next_offset[half] = offsets[at];
    }
  };

  float sums[SUMS];
#pragma unroll
  for (int i = 0; i < SUMS; ++i) sums[i] = 0.0f;
  load_scales(0);
  copy_rows(0);
  copy_rows(1);
  copy_words(0);
  copy_words(1);
  copy_words(2);
  const unsigned words_at = own_words + (warp % 4 * 16 + quad) * PITCH + member * 16;

#pragma unroll 1
  for (int step = 0; step < STEPS; ++step) {
    asm volatile("cp.async.wait_group 2;" ::: "memory");
    asm volatile("bar.sync %0, 128;" :: "r"(of_four + 1) : "memory");
    copy_words(step + 3);
    copy_rows(step + 2);
    Pair scale[2], offset[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      scale[half] = Halves<T>::twice(next_scale[half]);
      offset[half] = Halves<T>::twice(next_offset[half]);
    }
    if (step + 1 < STEPS) load_scales(step + 1);
    unsigned packed[2][4];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(packed[half][0]), "=r"(packed[half][1]), "=r"(packed[half][2]),
                     "=r"(packed[half][3])
                   : "r"(words_at + step % BUFFERS * WORDS_NBYTES + half * 8 * PITCH));
    }
    // Eight rows are 1024 bytes; patterns of 128 bytes.
    const unsigned long long described =
        (((base + step % BUFFERS * ROWS_NBYTES) & 0x3ffffull) >> 4) | (1ull << 16) |
        ((1024ull >> 4) << 32) | (1ull << 62);
#pragma unroll
    for (int first = 0; first < 8; first += AT_ONCE) {
      unsigned weights[AT_ONCE][4];
      asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
      // The last step's rows have been read.
      if (first == 0) {
        arrive_if(gone + 8 * ((step + BUFFERS - 1) % BUFFERS), step > 0 && own == 0);
      }
#pragma unroll
      for (int next = 0; next < AT_ONCE; ++next) {
        const int at = first + next;  // sixteen positions
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const unsigned shifted = packed[i % 2][at / 2] >> ((at % 2 * 2 + i / 2) * 4);
          unsigned apart;
          asm("lop3.b32 %0, %1, %2, %3, 0xEA;"  // (shifted & 0x000f000f) | ONES
              : "=r"(apart) : "r"(shifted), "r"(0x000f000fu), "r"(Halves<T>::ONES));
          const Pair integers =
              __hsub2(*reinterpret_cast<const Pair*>(&apart), Halves<T>::base());
          const Pair numbers = __hfma2(integers, scale[i % 2], offset[i % 2]);
          weights[next][i] = *reinterpret_cast<const unsigned*>(&numbers);
        }
      }
      if (first == 0) wait_for(come + 8 * (step % BUFFERS), step / BUFFERS & 1);
      asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
      for (int next = 0; next < AT_ONCE; ++next) {
        const int at = first + next;
        multiply_64(T(), sums, weights[next], described + (at / 4 * SLAB + at % 4 * 32) / 16);
      }
      asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    }
  }
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
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
