"""The CUDA code of `vector`: a row times a matrix, in two ways of sharing the work out.

Invariants:
- A load takes 16 bytes a thread and is read once: it does not stay in a cache.
- As many loads again are under way while what has come is added up.
"""

SHARED_ROWS = """
  constexpr int STEPS = K / 256, THREADS = 32 * WARPS, EACH = GATED ? ROWS / 2 : ROWS;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, first = blockIdx.x * EACH * GROUPS;
  const int at = warp * LOADS * 32 + lane;
  const uint4* from = reinterpret_cast<const uint4*>(matrix) + at;
  auto here = [&](int s) { return LOADS * WARPS == STEPS || warp * LOADS + s < STEPS; };
  auto load = [&](int group, uint4 (&to)[ROWS][LOADS]) {
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      const int output = min(first + group * EACH + (GATED ? r / 2 : r), N - 1);
      const long long row = GATED && r % 2 ? (long long)output + N : output;
#pragma unroll
      for (int s = 0; s < LOADS; ++s) {
        to[r][s] = here(s) ? __ldcs(from + row * (K / 8) + 32 * s) : make_uint4(0, 0, 0, 0);
      }
    }
  };
  uint4 now[ROWS][LOADS];
  load(0, now);
  float x[LOADS][8], square = 0.0f;
#pragma unroll
  for (int s = 0; s < LOADS; ++s) {
    const uint4 none = make_uint4(0, 0, 0, 0);
    widen<T>(here(s) ? __ldg(reinterpret_cast<const uint4*>(input) + at + 32 * s) : none, x[s]);
    if constexpr (NORMED) {
      float w[8];
      widen<T>(here(s) ? __ldg(reinterpret_cast<const uint4*>(norm) + at + 32 * s) : none, w);
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        square = fmaf(x[s][j], x[s][j], square);
        x[s][j] *= w[j];
      }
    }
  }
  __shared__ float sums[GROUPS * ROWS][WARPS], squares[WARPS];
#pragma unroll 1
  for (int group = 0; group < GROUPS; ++group) {
    uint4 next[ROWS][LOADS];
    if (group + 1 < GROUPS) load(group + 1, next);
    float sum[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      sum[r] = 0.0f;
#pragma unroll
      for (int s = 0; s < LOADS; ++s) {
        float w[8];
        widen<T>(now[r][s], w);
#pragma unroll
        for (int j = 0; j < 8; ++j) sum[r] = fmaf(w[j], x[s][j], sum[r]);
      }
    }
    int far = 16;
#pragma unroll
    for (int half = ROWS / 2; half; half /= 2, far /= 2) {
      const bool upper = lane & far;
#pragma unroll
      for (int r = 0; r < half; ++r) {
        const float given = upper ? sum[r] : sum[r + half];
        sum[r] = (upper ? sum[r + half] : sum[r]) + __shfl_xor_sync(~0u, given, far);
      }
    }
#pragma unroll
    for (; far; far /= 2) sum[0] += __shfl_xor_sync(~0u, sum[0], far);
    if (lane % (32 / ROWS) == 0) sums[group * ROWS + lane / (32 / ROWS)][warp] = sum[0];
#pragma unroll
    for (int r = 0; r < ROWS; ++r)
#pragma unroll
      for (int s = 0; s < LOADS; ++s) now[r][s] = next[r][s];
  }
  if constexpr (NORMED) {
#pragma unroll
    for (int far = 16; far; far /= 2) square += __shfl_xor_sync(~0u, square, far);
    if (lane == 0) squares[warp] = square;
  }
  __syncthreads();
  for (int i = threadIdx.x; i < EACH * GROUPS; i += THREADS) {
    if (first + i >= N) break;
    float factor = 1.0f;
    if constexpr (NORMED) {
      square = 0.0f;
#pragma unroll
      for (int w = 0; w < WARPS; ++w) square += squares[w];
      factor = rsqrtf(square / K + EPS_VALUE);
    }
    auto total = [&](int row) {
      float sum = 0.0f;
#pragma unroll
      for (int w = 0; w < WARPS; ++w) sum += sums[row][w];
      return sum * factor;
    };
    float sum = total(GATED ? 2 * i : i);
    if constexpr (GATED) {
      const float gate = static_cast<float>(static_cast<T>(sum));
      const float up = static_cast<float>(static_cast<T>(total(GATED ? 2 * i + 1 : 0)));
      sum = gate / (1.0f + __expf(-gate)) * up;
    }
    if constexpr (ADDED) sum += static_cast<float>(residual[first + i]);
    out[first + i] = static_cast<OUT>(sum);
  }
"""
"""A block's warps share each row of the matrix, and keep their part of the input in registers: it
is normalised there, but for the factor, which the sums are multiplied by."""

WHOLE_ROWS = """
  constexpr int STEPS = K / 256;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int first = (blockIdx.x * WARPS + warp) * ROWS;
  const uint4* rows[ROWS];
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    const long long row = min(first + r, N - 1);
    rows[r] = reinterpret_cast<const uint4*>(matrix) + row * (K / 8) + lane;
  }
  const uint4* given = reinterpret_cast<const uint4*>(input);
  auto load = [&](int step, uint4 (&to)[ROWS][LOADS]) {
#pragma unroll
    for (int u = 0; u < LOADS; ++u)
#pragma unroll
      for (int r = 0; r < ROWS; ++r) to[r][u] = __ldcs(rows[r] + 32 * (step + u));
  };
  uint4 now[ROWS][LOADS];
  load(0, now);
  float sums[ROWS];
#pragma unroll
  for (int r = 0; r < ROWS; ++r) sums[r] = 0.0f;
#pragma unroll 2
  for (int step = 0; step < STEPS; step += LOADS) {
    uint4 next[ROWS][LOADS];
    if (step + LOADS < STEPS) load(step + LOADS, next);
#pragma unroll
    for (int u = 0; u < LOADS; ++u) {
      float x[8];
      widen<T>(__ldg(given + 32 * (step + u) + lane), x);
#pragma unroll
      for (int r = 0; r < ROWS; ++r) {
        float w[8];
        widen<T>(now[r][u], w);
#pragma unroll
        for (int j = 0; j < 8; ++j) sums[r] = fmaf(w[j], x[j], sums[r]);
      }
    }
#pragma unroll
    for (int u = 0; u < LOADS; ++u)
#pragma unroll
      for (int r = 0; r < ROWS; ++r) now[r][u] = next[r][u];
  }
#pragma unroll
  for (int r = 0; r < ROWS; ++r)
#pragma unroll
    for (int far = 16; far; far /= 2) sums[r] += __shfl_xor_sync(~0u, sums[r], far);
  if (lane == 0) {
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      if (first + r >= N) break;
      float sum = sums[r];
      if constexpr (ADDED) sum += static_cast<float>(residual[first + r]);
      out[first + r] = static_cast<OUT>(sum);
    }
  }
"""
"""Each warp takes rows of its own: for an input that is too wide for registers."""
