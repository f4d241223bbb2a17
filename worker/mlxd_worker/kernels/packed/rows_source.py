"""The text of `packed_rows`: few rows times a matrix of 4 bits, on tensor cores.

A warp multiplies strips of sixteen outputs with all rows of its block, 128 inputs at a time (a
step). Of a step, thread t of a quad has inputs 32 t to 32 t + 31: what it loads of the weight is
sixteen bytes of one row, and what it needs of the rows lies in shared memory in its own order. The
product of a fragment does not ask which inputs its columns are, as long as both sides agree.
"""

_HALVES = """
template <>
struct Halves<SCALAR> {
  using Pair = SCALAR2;
  static constexpr unsigned ONES = ONES_BITS;
  static __device__ __forceinline__ Pair base() { return __float2TYPE2_rn(ONES_VALUE); }
  static __device__ __forceinline__ Pair twice(SCALAR value) { return TWICE(value); }
  static __device__ __forceinline__ SCALAR narrow(float value) { return __float2TYPE_rn(value); }
  static __device__ __forceinline__ void multiply(
      float (&sums)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.KIND.KIND.f32 "
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
};
"""


def _halves(**names: str) -> str:
    """Return what a type of sixteen bits has, by what CUDA calls each thing."""
    text = _HALVES
    for name, value in names.items():
        text = text.replace(name, value)
    return text


_BFLOAT16 = _halves(
    ONES_BITS="0x43004300u",  # 128, whose last bits are a number below 128
    ONES_VALUE="128.0f",
    SCALAR2="__nv_bfloat162",
    SCALAR="__nv_bfloat16",
    TWICE="__bfloat162bfloat162",
    TYPE="bfloat16",
    KIND="bf16",
)
_FLOAT16 = _halves(
    ONES_BITS="0x64006400u",  # 1024, likewise
    ONES_VALUE="1024.0f",
    SCALAR2="__half2",
    SCALAR="__half",
    TWICE="__half2half2",
    TYPE="half",
    KIND="f16",
)

HEADER = (
    f"template <typename T> struct Halves;\n{_BFLOAT16}{_FLOAT16}"
    """
// Eight integers of a word as numbers: pairs of neighbours, rounded once.
template <typename T>
__device__ __forceinline__ void unpack(
    unsigned word, typename Halves<T>::Pair scale, typename Halves<T>::Pair offset,
    unsigned (&pairs)[4]) {
  using Pair = typename Halves<T>::Pair;
  unsigned apart[4];  // integers i and i + 4
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    apart[i] = ((word >> (4 * i)) & 0x000f000fu) | Halves<T>::ONES;
  }
  pairs[0] = __byte_perm(apart[0], apart[1], 0x5410);
  pairs[1] = __byte_perm(apart[2], apart[3], 0x5410);
  pairs[2] = __byte_perm(apart[0], apart[1], 0x7632);
  pairs[3] = __byte_perm(apart[2], apart[3], 0x7632);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const Pair integers = __hsub2(*reinterpret_cast<Pair*>(&pairs[i]), Halves<T>::base());
    const Pair numbers = __hfma2(integers, scale, offset);
    pairs[i] = *reinterpret_cast<const unsigned*>(&numbers);
  }
}

// Sixteen bytes into shared memory, or as many zeros, behind the thread's back.
__device__ __forceinline__ void copy_vector(uint4* target, const void* source, bool there) {
  const unsigned at = static_cast<unsigned>(__cvta_generic_to_shared(target));
  asm volatile("cp.async.ca.shared.global [%0], [%1], 16, %2;"
               :: "r"(at), "l"(source), "r"(there ? 16 : 0) : "memory");
}
"""
)

TEXT = """
  constexpr int STEP = 128;                 // inputs of a step
  constexpr int STAGE = STEP * SPLITS;      // inputs of a stage: a step of each split
  constexpr int STAGES = K / STAGE;
  constexpr int ROWS = 8 * TILES;           // rows of a block
  constexpr int VECTORS = ROWS * STAGE / 8; // of sixteen bytes, which a stage's rows are
  constexpr int OUTPUTS = 16 * STRIPS;      // outputs of a warp
  constexpr int BLOCK_OUTPUTS = OUTPUTS * WARPS;
  constexpr int THREADS = 32 * WARPS * SPLITS;
  using Pair = typename Halves<T>::Pair;
  extern __shared__ uint4 shared[];

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int quad = lane / 4, member = lane % 4;
  const int split = warp % SPLITS, group_of_warps = warp / SPLITS;
  const int first_row = blockIdx.y * ROWS;
  const int here = min(ROWS, rows - first_row);
  // The last block's outputs end where all do: some are computed twice, and are the same.
  const int first_output = min((int)blockIdx.x * BLOCK_OUTPUTS, N - BLOCK_OUTPUTS);

  // A thread copies the same part of the same row of a tile each time; units are tiles of steps.
  constexpr int AT_ONCE = THREADS / 128;
  constexpr int UNITS = TILES * SPLITS;
  static_assert(THREADS % 128 == 0 && UNITS % AT_ONCE == 0, "every thread copies as much");
  const int unit = threadIdx.x / 128;
  const int part_copied = (threadIdx.x & 1) | ((threadIdx.x >> 5) & 2);
  const int of_copied = (threadIdx.x >> 1) & 3, row_copied = (threadIdx.x >> 3) & 7;
  constexpr bool MANY_TILES = TILES >= AT_ONCE;
  const int tile_copied = MANY_TILES ? unit : unit % TILES;
  const int step_copied = MANY_TILES ? 0 : unit / TILES;
  const int left = here - tile_copied * 8 - row_copied;
  const T* given = input + (long long)(first_row + tile_copied * 8 + row_copied) * K +
      step_copied * STEP + of_copied * 32 + part_copied * 8;
  // Two parts of a row lie in the same banks: the second one's rows change places.
  uint4* place = shared + unit * 128 + part_copied * 32 +
      (row_copied ^ (part_copied & 1)) * 4 + of_copied;
  auto copy_stage = [&](int half) {
#pragma unroll
    for (int each = 0; each < UNITS / AT_ONCE; ++each) {
      const int tile = MANY_TILES ? each * AT_ONCE % TILES : 0;
      const int step = MANY_TILES ? each * AT_ONCE / TILES : each * (AT_ONCE / TILES);
      const bool there = left > tile * 8;
      copy_vector(place + half * VECTORS + each * AT_ONCE * 128,
                  there ? given + tile * 8 * K + step * STEP : input, there);
    }
    given += STAGE;
  };

  const int output = first_output + group_of_warps * OUTPUTS + quad;
  const uint4* weights = reinterpret_cast<const uint4*>(words) + (long long)output * (K / 32) +
      split * (STEP / 32) + member;
  const long long group = (long long)output * (K / GROUP) + (split * STEP + member * 32) / GROUP;
  const T* scale_at = scales + group;
  const T* offset_at = offsets + group;
  uint4 loaded[STRIPS][2];
  T loaded_scales[STRIPS][2], loaded_offsets[STRIPS][2];
  auto load = [&]() {
#pragma unroll
    for (int strip = 0; strip < STRIPS; ++strip) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = strip * 16 + half * 8;
        loaded[strip][half] = __ldg(weights + row * (K / 32));
        loaded_scales[strip][half] = scale_at[row * (K / GROUP)];
        loaded_offsets[strip][half] = offset_at[row * (K / GROUP)];
      }
    }
    weights += STAGE / 32;
    scale_at += STAGE / GROUP;
    offset_at += STAGE / GROUP;
  };

  float sums[STRIPS][TILES][4] = {};
  load();
  copy_stage(0);
  asm volatile("cp.async.commit_group;" ::: "memory");
#pragma unroll 2
  for (int stage = 0; stage < STAGES; ++stage) {
    asm volatile("cp.async.wait_group 0;" ::: "memory");
    __syncthreads();
    if (stage + 1 < STAGES) copy_stage((stage + 1) % 2);
    asm volatile("cp.async.commit_group;" ::: "memory");
    uint4 now[STRIPS][2];
    Pair scale[STRIPS][2], offset[STRIPS][2];
#pragma unroll
    for (int strip = 0; strip < STRIPS; ++strip) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        now[strip][half] = loaded[strip][half];
        scale[strip][half] = Halves<T>::twice(loaded_scales[strip][half]);
        offset[strip][half] = Halves<T>::twice(loaded_offsets[strip][half]);
      }
    }
    if (stage + 1 < STAGES) load();
    const uint4* staged = shared + (stage % 2) * VECTORS + split * TILES * 128;
#pragma unroll
    for (int part = 0; part < 4; ++part) {
      unsigned low[STRIPS][4], high[STRIPS][4];
#pragma unroll
      for (int strip = 0; strip < STRIPS; ++strip) {
        unsigned pairs[2][4];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const uint4& vector = now[strip][half];
          const unsigned word =
              part == 0 ? vector.x : part == 1 ? vector.y : part == 2 ? vector.z : vector.w;
          unpack<T>(word, scale[strip][half], offset[strip][half], pairs[half]);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          low[strip][i] = pairs[i % 2][i / 2];
          high[strip][i] = pairs[i % 2][2 + i / 2];
        }
      }
      const uint4* staged_rows = staged + (quad ^ (part & 1)) * 4 + member;
#pragma unroll
      for (int tile = 0; tile < TILES; ++tile) {
        const uint4 row = staged_rows[(tile * 4 + part) * 32];
#pragma unroll
        for (int strip = 0; strip < STRIPS; ++strip) {
          Halves<T>::multiply(sums[strip][tile], low[strip], row.x, row.y);
          Halves<T>::multiply(sums[strip][tile], high[strip], row.z, row.w);
        }
      }
    }
  }

  // The splits' sums meet in shared memory, always in the same order.
  constexpr int WIDTH = ROWS + 1;
  float* met = reinterpret_cast<float*>(shared);
  __syncthreads();
#pragma unroll
  for (int strip = 0; strip < STRIPS; ++strip) {
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int place_of = group_of_warps * OUTPUTS + strip * 16 + (i / 2) * 8 + quad;
        const int row = tile * 8 + member * 2 + i % 2;
        met[(split * BLOCK_OUTPUTS + place_of) * WIDTH + row] = sums[strip][tile][i];
      }
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < BLOCK_OUTPUTS * here; i += THREADS) {
    const int row = i / BLOCK_OUTPUTS, place_of = i % BLOCK_OUTPUTS;
    float sum = 0.0f;
#pragma unroll
    for (int other = 0; other < SPLITS; ++other) {
      sum += met[(other * BLOCK_OUTPUTS + place_of) * WIDTH + row];
    }
    out[(long long)(first_row + row) * N + first_output + place_of] = Halves<T>::narrow(sum);
  }
"""
