"""One token of each row: rotate it, put its key and value where they belong, attend; on CUDA.

Invariants:
- Keys and values are written IN PLACE, into arrays that MLX knows as inputs. That is sound where
  the caller owns them alone: nobody else holds a view, and what reads them next either waits for
  this kernel's result or comes after it has been evaluated. In return a step may be dispatched
  while another is under way without copying the caches.
- A row reads its own positions, not all of its arena's capacity, and needs no mask.
- A block reads the positions of one part of a row for one head of keys; parts are joined by a
  second kernel, where there are several.
"""

from dataclasses import dataclass
from functools import cache

import mlx.core as mx

from mlxd_worker.kernels.device import HALVES, WIDEN, Kernel, runs_cuda

HEAD_DIMS = (64, 128)
SHARED_MAX = 8
"""The most heads of queries that share one of keys."""

WIDE_SHARED_MAX = 4
"""The same for a block of twice the threads: what these have read must fit into its memory."""

BLOCKS_ENOUGH = 264
"""Blocks that keep the device busy: two for each processor of an H100 or H200."""

PART_TOKENS_MIN = 64

_LOG2_E = 1.4426950408889634

_ATTEND = """
  constexpr int G = H / KV, LANES = D / 8, GROUPS = THREADS / LANES, U = 4, PART = CAP / PARTS;
  const int part = blockIdx.x, head = blockIdx.y, row = blockIdx.z;
  const int position = positions[row], start = part * PART;
  if (start > position) return;
  const int cached = min(start + PART, position);
  const bool own = position < start + PART;
  __shared__ float asked[G * D];
  __shared__ float new_key[D], new_value[D];
  __shared__ float tops[GROUPS * G], totals[GROUPS * G], reads[GROUPS * G * D];
  const T* given = joined + (long long)row * (H + 2 * KV) * D;
  const long long slot = ((long long)slots[row] * KV + head) * CAP * D;
  for (int i = threadIdx.x; i < (G + 1) * D / 2; i += THREADS) {
    const int which = i / (D / 2), pair = i % (D / 2);
    float sine, cosine;
    sincosf(static_cast<float>(position) / periods[pair], &sine, &cosine);
    const T* from = given + (which < G ? head * G + which : H + head) * D + pair;
    const float a = static_cast<float>(from[0]), b = static_cast<float>(from[D / 2]);
    const T left = static_cast<T>(a * cosine - b * sine);
    const T right = static_cast<T>(a * sine + b * cosine);
    if (which < G) {
      asked[which * D + pair] = static_cast<float>(left) * SCALE_VALUE;
      asked[which * D + pair + D / 2] = static_cast<float>(right) * SCALE_VALUE;
    } else if (own) {
      T* to = const_cast<T*>(keys) + slot + (long long)position * D + pair;
      to[0] = left;
      to[D / 2] = right;
      new_key[pair] = static_cast<float>(left);
      new_key[pair + D / 2] = static_cast<float>(right);
    }
  }
  if (own) {
    for (int i = threadIdx.x; i < D; i += THREADS) {
      const T value = given[(H + KV + head) * D + i];
      const_cast<T*>(values)[slot + (long long)position * D + i] = value;
      new_value[i] = static_cast<float>(value);
    }
  }
  __syncthreads();
  const int lane = threadIdx.x % LANES, group = threadIdx.x / LANES;
  float query[G][8], read[G][8], top[G], total[G];
#pragma unroll
  for (int g = 0; g < G; ++g) {
    top[g] = -1e30f;
    total[g] = 0.0f;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      query[g][j] = asked[g * D + lane * 8 + j];
      read[g][j] = 0.0f;
    }
  }
  const uint4* from_keys = reinterpret_cast<const uint4*>(keys + slot) + lane;
  const uint4* from_values = reinterpret_cast<const uint4*>(values + slot) + lane;
  for (int at = start; at < cached; at += GROUPS * U) {
    uint4 key[U], value[U];
    bool there[U];
#pragma unroll
    for (int u = 0; u < U; ++u) {
      const int token = at + u * GROUPS + group;
      there[u] = token < cached;
      const long long offset = (long long)(there[u] ? token : start) * LANES;
      key[u] = from_keys[offset];
      value[u] = from_values[offset];
    }
    float score[U][G];
#pragma unroll
    for (int u = 0; u < U; ++u) {
      float k[8];
      widen<T>(key[u], k);
#pragma unroll
      for (int g = 0; g < G; ++g) {
        float sum = 0.0f;
#pragma unroll
        for (int j = 0; j < 8; ++j) sum = fmaf(query[g][j], k[j], sum);
#pragma unroll
        for (int far = LANES / 2; far; far /= 2) sum += __shfl_xor_sync(~0u, sum, far);
        score[u][g] = there[u] ? sum : -1e30f;
      }
    }
    float weight[U][G];
#pragma unroll
    for (int g = 0; g < G; ++g) {
      float best = top[g];
#pragma unroll
      for (int u = 0; u < U; ++u) best = fmaxf(best, score[u][g]);
      const float less = exp2f(top[g] - best);
      top[g] = best;
      total[g] *= less;
#pragma unroll
      for (int j = 0; j < 8; ++j) read[g][j] *= less;
#pragma unroll
      for (int u = 0; u < U; ++u) {
        weight[u][g] = there[u] ? exp2f(score[u][g] - best) : 0.0f;
        total[g] += weight[u][g];
      }
    }
#pragma unroll
    for (int u = 0; u < U; ++u) {
      float v[8];
      widen<T>(value[u], v);
#pragma unroll
      for (int g = 0; g < G; ++g)
#pragma unroll
        for (int j = 0; j < 8; ++j) read[g][j] = fmaf(weight[u][g], v[j], read[g][j]);
    }
  }
  if (own && threadIdx.x < 32) {
#pragma unroll
    for (int g = 0; g < G; ++g) {
      float sum = 0.0f;
#pragma unroll
      for (int j = 0; j < 8; ++j) sum = fmaf(query[g][j], new_key[lane * 8 + j], sum);
#pragma unroll
      for (int far = LANES / 2; far; far /= 2) sum += __shfl_xor_sync(~0u, sum, far);
      if (group == 0) {
        const float best = fmaxf(top[g], sum);
        const float less = exp2f(top[g] - best), weight = exp2f(sum - best);
        top[g] = best;
        total[g] = total[g] * less + weight;
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          read[g][j] = read[g][j] * less + weight * new_value[lane * 8 + j];
        }
      }
    }
  }
#pragma unroll
  for (int g = 0; g < G; ++g) {
    if (lane == 0) {
      tops[group * G + g] = top[g];
      totals[group * G + g] = total[g];
    }
#pragma unroll
    for (int j = 0; j < 8; ++j) reads[(group * G + g) * D + lane * 8 + j] = read[g][j];
  }
  __syncthreads();
  for (int i = threadIdx.x; i < G * D; i += THREADS) {
    const int g = i / D, d = i % D;
    float best = -1e30f, sum = 0.0f, whole = 0.0f;
    for (int k = 0; k < GROUPS; ++k) best = fmaxf(best, tops[k * G + g]);
    for (int k = 0; k < GROUPS; ++k) {
      const float less = exp2f(tops[k * G + g] - best);
      sum += less * reads[(k * G + g) * D + d];
      whole += less * totals[k * G + g];
    }
    const long long asking = (long long)row * H + head * G + g;
    if constexpr (PARTS == 1) {
      out[asking * D + d] = static_cast<T>(sum / whole);
    } else {
      out[(asking * PARTS + part) * (D + 2) + d] = sum;
      if (d == 0) {
        out[(asking * PARTS + part) * (D + 2) + D] = best;
        out[(asking * PARTS + part) * (D + 2) + D + 1] = whole;
      }
    }
  }
"""

_JOIN = """
  const int asking = blockIdx.x, d = threadIdx.x;
  const int used = positions[asking / H] / (CAP / PARTS) + 1;
  const float* from = parts + (long long)asking * PARTS * (D + 2);
  float best = -1e30f, sum = 0.0f, whole = 0.0f;
  for (int k = 0; k < used; ++k) best = fmaxf(best, from[k * (D + 2) + D]);
  for (int k = 0; k < used; ++k) {
    const float less = exp2f(from[k * (D + 2) + D] - best);
    sum += less * from[k * (D + 2) + d];
    whole += less * from[k * (D + 2) + D + 1];
  }
  out[(long long)asking * D + d] = static_cast<T>(sum / whole);
"""


def serves(*, heads: int, kv_heads: int, head_dim: int, dtype: mx.Dtype) -> bool:
    """Return whether `attend_in_place` can do this."""
    return (
        runs_cuda()
        and dtype in HALVES
        and head_dim in HEAD_DIMS
        and heads // kv_heads <= SHARED_MAX
    )


@dataclass(frozen=True, slots=True)
class Target:
    """Where each row's token goes: int32 [N] slots and positions of the arrays that hold them."""

    slots: mx.array
    positions: mx.array
    keys: mx.array
    """`[slots, kv_heads, capacity, head_dim]`, as the values."""
    values: mx.array


def attend_in_place(
    joined: mx.array, periods: mx.array, at: Target, *, heads: int, scale: float
) -> mx.array:
    """Write each row's key and value; return what its queries read, `[N, heads * head_dim]`, lazy.

    joined: `[N, (heads + 2 * kv_heads) * head_dim]`, not rotated. periods: float32 [head_dim / 2],
    positions per radian of each pair. Keys and values hold the tokens once the result has been
    evaluated.
    """
    positions, keys = at.positions, at.keys
    rows = joined.shape[0]
    _, kv_heads, capacity, head_dim = keys.shape
    parts = _parts(rows * kv_heads, capacity)
    # Twice the threads where a block has a row to itself.
    threads = 256 if parts == 1 and heads // kv_heads <= WIDE_SHARED_MAX else 128
    sizes = [("H", heads), ("CAP", capacity), ("PARTS", parts), ("D", head_dim)]
    whole = (rows, heads * head_dim)
    (read,) = _attend_kernel(scale)(
        inputs=[joined, positions, at.slots, periods, keys, at.values],
        output_shapes=[whole if parts == 1 else (rows, heads, parts, head_dim + 2)],
        output_dtypes=[keys.dtype if parts == 1 else mx.float32],
        grid=(parts * threads, kv_heads, rows),
        threadgroup=(threads, 1, 1),
        template=[("T", keys.dtype), ("KV", kv_heads), ("THREADS", threads), *sizes],
    )
    if parts == 1:
        return read
    (result,) = _join_kernel()(
        inputs=[read, positions],
        output_shapes=[whole],
        output_dtypes=[keys.dtype],
        grid=(rows * heads * head_dim, 1, 1),
        threadgroup=(head_dim, 1, 1),
        template=[("T", keys.dtype), *sizes],
    )
    return result


def _parts(blocks: int, capacity: int) -> int:
    """Return into how many parts a row is cut: a power of two that divides the capacity."""
    parts = 1
    while blocks * parts < BLOCKS_ENOUGH and capacity % (parts * 2 * PART_TOKENS_MIN) == 0:
        parts *= 2
    return parts


@cache
def _attend_kernel(scale: float) -> Kernel:
    return mx.fast.cuda_kernel(
        name="decode_attention",
        input_names=["joined", "positions", "slots", "periods", "keys", "values"],
        output_names=["out"],
        source=_ATTEND.replace("SCALE_VALUE", f"{scale * _LOG2_E:.9e}f"),
        header=WIDEN,
    )


@cache
def _join_kernel() -> Kernel:
    return mx.fast.cuda_kernel(
        name="decode_attention_join",
        input_names=["parts", "positions"],
        output_names=["out"],
        source=_JOIN,
    )
