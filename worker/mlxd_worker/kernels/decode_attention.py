"""One token of each row: rotate it, put its key and value where they belong, attend; on CUDA.

Invariants:
- Keys and values are written IN PLACE, into arrays that MLX knows as inputs. That is sound where
  the caller owns them alone: no other view exists, and what reads them next either waits for
  this kernel's result or comes after it has been evaluated. In return a step may be dispatched
  while another is under way without copying the caches.
- A row reads its own positions, not all of its arena's capacity, and needs no mask.
- A block reads the positions of one part of a row for one head of keys. Parts are cut by where the
  row stands, not by its arena's capacity: a short row in a long arena takes no longer. The last of
  a row's blocks to end joins what they have read; `tickets` tell which that is, and are zero again
  afterwards.
"""

from dataclasses import dataclass
from functools import cache

import mlx.core as mx

from mlxd_shared.domain.fast_paths import FastPath
from mlxd_worker.kernels.device import HALVES, WIDEN, runs_cuda
from mlxd_worker.kernels.own import Body, OwnKernel
from mlxd_worker.kernels.switches import SWITCHES

HEAD_DIMS = (64, 128)
SHARED_MAX = 8
"""The most heads of queries that share one of keys."""

WIDE_SHARED_MAX = 4
"""The same for a block of twice the threads: what these have read must fit into its memory."""

BLOCKS_ENOUGH = 128
"""So many blocks keep the device busy: about one for each processor of an H100 or H200."""

PARTS_MAX = 16
PART_TOKENS_MIN = 64

LONG_CAPACITY = 4096
"""From this capacity on blocks are wide also where each has a row to itself."""

TICKETS_MIN = 8
"""MLX keeps smaller arrays in the host's memory."""

_LOG2_E = 1.4426950408889634

_ATTEND = """
  constexpr int G = H / KV, LANES = D / 8, GROUPS = THREADS / LANES;
  constexpr int WARPS = THREADS / 32, AT_ONCE = GROUPS * U;
  const int part = blockIdx.x, head = blockIdx.y, row = blockIdx.z;
  const int position = places[COLUMNS * row + 1];
  const int turned = COLUMNS == 2 ? position : places[COLUMNS * row + 2];
  const int PART = (position / (PARTS * PART_LEAST) + 1) * PART_LEAST, start = part * PART;
  if (start > position) return;
  const int cached = min(start + PART, position);
  const bool own = position < start + PART;
  const int lane = threadIdx.x % LANES, group = threadIdx.x / LANES, warp = threadIdx.x / 32;
  const long long slot = ((long long)places[COLUMNS * row] * KV + head) * CAP * D;
  const uint4* from_keys = reinterpret_cast<const uint4*>(keys + slot) + lane;
  const uint4* from_values = reinterpret_cast<const uint4*>(values + slot) + lane;
  auto load = [&](int at, uint4 (&key)[U], uint4 (&value)[U]) {
#pragma unroll
    for (int u = 0; u < U; ++u) {
      const int token = at + u * GROUPS + group;
      const long long offset = (long long)(token < cached ? token : start) * LANES;
      key[u] = from_keys[offset];
      value[u] = from_values[offset];
    }
  };
  uint4 key[U], value[U];
  load(start, key, value);
  __shared__ float asked[G * D];
  __shared__ float new_key[D], new_value[D];
  __shared__ float tops[WARPS * G], totals[WARPS * G], reads[WARPS * G * D];
  const T* given = joined + (long long)row * (H + 2 * KV) * D;
  for (int i = threadIdx.x; i < (G + 1) * D / 2; i += THREADS) {
    const int which = i / (D / 2), pair = i % (D / 2);
    const T* from = given + (which < G ? head * G + which : H + head) * D + pair;
    const float a = static_cast<float>(from[0]), b = static_cast<float>(from[D / 2]);
    float sine, cosine;
    sincosf(static_cast<float>(turned) / periods[pair], &sine, &cosine);
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
      const T one = given[(H + KV + head) * D + i];
      const_cast<T*>(values)[slot + (long long)position * D + i] = one;
      new_value[i] = static_cast<float>(one);
    }
  }
  __syncthreads();
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
  auto product = [&](const float (&k)[8], int g) {
    float sum = 0.0f;
#pragma unroll
    for (int j = 0; j < 8; ++j) sum = fmaf(query[g][j], k[j], sum);
#pragma unroll
    for (int far = LANES / 2; far; far /= 2) sum += __shfl_xor_sync(~0u, sum, far);
    return sum;
  };
  for (int at = start; at < cached; at += AT_ONCE) {
    uint4 next_key[U], next_value[U];
    if (at + AT_ONCE < cached) load(at + AT_ONCE, next_key, next_value);
    float score[U][G];
#pragma unroll
    for (int u = 0; u < U; ++u) {
      const bool there = at + u * GROUPS + group < cached;
      float k[8];
      widen<T>(key[u], k);
#pragma unroll
      for (int g = 0; g < G; ++g) {
        const float sum = product(k, g);
        score[u][g] = there ? sum : -1e38f;
      }
    }
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
        score[u][g] = exp2f(score[u][g] - best);
        total[g] += score[u][g];
      }
    }
#pragma unroll
    for (int u = 0; u < U; ++u) {
      float v[8];
      widen<T>(value[u], v);
#pragma unroll
      for (int g = 0; g < G; ++g)
#pragma unroll
        for (int j = 0; j < 8; ++j) read[g][j] = fmaf(score[u][g], v[j], read[g][j]);
    }
#pragma unroll
    for (int u = 0; u < U; ++u) {
      key[u] = next_key[u];
      value[u] = next_value[u];
    }
  }
  if (own && warp == 0) {
    float k[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) k[j] = new_key[lane * 8 + j];
#pragma unroll
    for (int g = 0; g < G; ++g) {
      const float sum = product(k, g);
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
    float best = top[g];
#pragma unroll
    for (int far = LANES; far < 32; far *= 2) best = fmaxf(best, __shfl_xor_sync(~0u, best, far));
    const float less = exp2f(top[g] - best);
    total[g] *= less;
#pragma unroll
    for (int far = LANES; far < 32; far *= 2) total[g] += __shfl_xor_sync(~0u, total[g], far);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      read[g][j] *= less;
#pragma unroll
      for (int far = LANES; far < 32; far *= 2) {
        read[g][j] += __shfl_xor_sync(~0u, read[g][j], far);
      }
      if (threadIdx.x % 32 < LANES) reads[(warp * G + g) * D + lane * 8 + j] = read[g][j];
    }
    if (threadIdx.x % 32 == 0) {
      tops[warp * G + g] = best;
      totals[warp * G + g] = total[g];
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < G * D; i += THREADS) {
    const int g = i / D, d = i % D;
    float best = -1e30f, sum = 0.0f, whole = 0.0f;
#pragma unroll
    for (int k = 0; k < WARPS; ++k) best = fmaxf(best, tops[k * G + g]);
#pragma unroll
    for (int k = 0; k < WARPS; ++k) {
      const float less = exp2f(tops[k * G + g] - best);
      sum += less * reads[(k * G + g) * D + d];
      whole += less * totals[k * G + g];
    }
    const long long asking = (long long)row * H + head * G + g;
    if constexpr (PARTS == 1) {
      out[asking * D + d] = static_cast<T>(sum / whole);
    } else {
      float* to = parts + (asking * PARTS + part) * (D + 2);
      to[d] = sum;
      if (d == 0) {
        to[D] = best;
        to[D + 1] = whole;
      }
    }
  }
  if constexpr (PARTS > 1) {
    __shared__ bool last;
    __threadfence();
    __syncthreads();
    const int used = position / PART + 1;
    if (threadIdx.x == 0) {
      int* ticket = const_cast<int*>(tickets) + row * KV + head;
      last = atomicAdd(ticket, 1) == used - 1;
      if (last) *ticket = 0;
    }
    __syncthreads();
    if (!last) return;
    __threadfence();
    const float* from = parts + ((long long)row * H + head * G) * PARTS * (D + 2);
#pragma unroll
    for (int i = threadIdx.x; i < G * D; i += THREADS) {
      const int g = i / D, d = i % D;
      float part_read[PARTS];
      float2 part_sum[PARTS];
#pragma unroll
      for (int k = 0; k < PARTS; ++k) {
        const float* one = from + (g * PARTS + k) * (D + 2);
        part_read[k] = k < used ? __ldcg(one + d) : 0.0f;
        part_sum[k] = k < used ? __ldcg(reinterpret_cast<const float2*>(one + D))
                               : make_float2(-1e30f, 0.0f);
      }
      float best = -1e30f, sum = 0.0f, whole = 0.0f;
#pragma unroll
      for (int k = 0; k < PARTS; ++k) best = fmaxf(best, part_sum[k].x);
#pragma unroll
      for (int k = 0; k < PARTS; ++k) {
        const float less = exp2f(part_sum[k].x - best);
        sum += less * part_read[k];
        whole += less * part_sum[k].y;
      }
      out[((long long)row * H + head * G + g) * D + d] = static_cast<T>(sum / whole);
    }
  }
"""


def serves(*, heads: int, kv_heads: int, head_dim: int, dtype: mx.Dtype) -> bool:
    """Return whether `attend_in_place` can do this."""
    return (
        runs_cuda()
        and SWITCHES.is_on(FastPath.DECODE_KERNEL)
        and dtype in HALVES
        and head_dim in HEAD_DIMS
        and heads // kv_heads <= SHARED_MAX
    )


@dataclass(frozen=True, slots=True)
class Cutting:
    """How the work is cut."""

    parts: int
    """Parts of a row's positions at most, each a block's."""
    threads: int
    """Threads of a block."""
    loads: int
    """Tokens whose loads each thread has under way."""


@dataclass(frozen=True, slots=True)
class Target:
    """Where each row's token goes."""

    places: mx.array
    """int32 [N or more, 2]: slots and positions; computed, because those of the host are slow. A
    third column is where tokens stand for rotations, if that may be elsewhere."""
    keys: mx.array
    """`[slots, kv_heads, capacity, head_dim]`, as the values."""
    values: mx.array
    tickets: mx.array
    """int32 [N * kv_heads or more], zero; of this kernel alone while it runs."""


def attend_in_place(
    joined: mx.array, periods: mx.array, at: Target, *, heads: int, scale: float
) -> mx.array:
    """Write each row's key and value; return what its queries read, `[N, heads * head_dim]`, lazy.

    joined: `[N, (heads + 2 * kv_heads) * head_dim]`, not rotated. periods: float32 [head_dim / 2],
    positions per radian of each pair. Keys and values hold the tokens once the result has been
    evaluated.
    """
    rows = joined.shape[0]
    _, kv_heads, capacity, head_dim = at.keys.shape
    cut = cutting(rows * kv_heads, capacity, shared=heads // kv_heads)
    read, _ = _kernel(scale)(
        inputs=[joined, at.places, periods, at.keys, at.values, at.tickets],
        output_shapes=[
            (rows, heads * head_dim),
            (rows, heads, cut.parts, head_dim + 2) if cut.parts > 1 else (1,),
        ],
        output_dtypes=[at.keys.dtype, mx.float32],
        grid=(cut.parts * cut.threads, kv_heads, rows),
        threadgroup=(cut.threads, 1, 1),
        template=[
            ("T", at.keys.dtype),
            ("H", heads),
            ("KV", kv_heads),
            ("D", head_dim),
            ("CAP", capacity),
            ("COLUMNS", at.places.shape[1]),
            ("PARTS", cut.parts),
            ("THREADS", cut.threads),
            ("U", cut.loads),
        ],
    )
    return read


def cutting(blocks: int, capacity: int, *, shared: int) -> Cutting:
    """Return how so many rows' heads of keys are shared out."""
    parts = 1
    while (
        blocks * parts < BLOCKS_ENOUGH
        and parts < PARTS_MAX
        and capacity % (parts * 2 * PART_TOKENS_MIN) == 0
    ):
        parts *= 2
    wide = parts > 1 or capacity >= LONG_CAPACITY
    threads = 256 if wide and shared <= WIDE_SHARED_MAX else 128
    return Cutting(parts=parts, threads=threads, loads=4)


@cache
def tickets_of(part: int, count: int) -> mx.array:
    """Return tickets of which each part of a pass, running beside the others, has its own."""
    del part
    tickets = mx.zeros(max(count, TICKETS_MIN), dtype=mx.int32)
    mx.eval(tickets)
    return tickets


@cache
def _kernel(scale: float) -> OwnKernel:
    text = _ATTEND.replace("SCALE_VALUE", f"{scale * _LOG2_E:.9e}f")
    text = text.replace("PART_LEAST", str(PART_TOKENS_MIN))
    inputs = ("joined", "places", "periods", "keys", "values", "tickets")
    return OwnKernel(Body("decode_attention", inputs, ("out", "parts"), text, WIDEN))
