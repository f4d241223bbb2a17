"""Keys and values of many tokens, several of them one row's, put where they belong; on CUDA.

Invariants:
- They are written IN PLACE, as `decode_attention` does, and on the same conditions.
- Whoever reads what was written has the result of this kernel as an input, and so comes after it.
"""

from functools import cache

import mlx.core as mx

from mlxd_worker.kernels.decode_attention import Target
from mlxd_worker.kernels.own import Body, OwnKernel

_WRITE = """
  const int head = blockIdx.x, row = blockIdx.y, pair = threadIdx.x;
  const int position = places[COLUMNS * row + 1];
  const int turned = COLUMNS == 2 ? position : places[COLUMNS * row + 2];
  const long long at = (((long long)places[COLUMNS * row] * KV + head) * CAP + position) * D;
  const T* given = joined + (long long)row * (H + 2 * KV) * D;
  const T* key = given + (H + head) * D + pair;
  const T* value = given + (H + KV + head) * D + pair;
  const float a = static_cast<float>(key[0]), b = static_cast<float>(key[D / 2]);
  float sine, cosine;
  sincosf(static_cast<float>(turned) / periods[pair], &sine, &cosine);
  T* keys_at = const_cast<T*>(keys) + at + pair;
  T* values_at = const_cast<T*>(values) + at + pair;
  keys_at[0] = static_cast<T>(a * cosine - b * sine);
  keys_at[D / 2] = static_cast<T>(a * sine + b * cosine);
  values_at[0] = value[0];
  values_at[D / 2] = value[D / 2];
  if (head == 0 && pair == 0) {
    written[COLUMNS * row] = places[COLUMNS * row];
    written[COLUMNS * row + 1] = position;
    if constexpr (COLUMNS > 2) written[COLUMNS * row + 2] = turned;
  }
"""
"""Rotates as `decode_attention` does, to the bit: that one writes the same values once more."""


def write_in_place(joined: mx.array, periods: mx.array, at: Target, *, heads: int) -> mx.array:
    """Write each token's key and value; return `at.places`, once all of them are there, lazy.

    As `attend_in_place`, but that several tokens may be one row's: who attends by the result reads
    what every token has written.
    """
    rows = joined.shape[0]
    _, kv_heads, capacity, head_dim = at.keys.shape
    assert at.places.shape[0] == rows, "places without padding"
    (written,) = _write_kernel()(
        inputs=[joined, at.places, periods, at.keys, at.values],
        output_shapes=[at.places.shape],
        output_dtypes=[at.places.dtype],
        grid=(kv_heads * head_dim // 2, rows, 1),
        threadgroup=(head_dim // 2, 1, 1),
        template=[
            ("T", at.keys.dtype),
            ("H", heads),
            ("KV", kv_heads),
            ("D", head_dim),
            ("CAP", capacity),
            ("COLUMNS", at.places.shape[1]),
        ],
    )
    return written


@cache
def _write_kernel() -> OwnKernel:
    inputs = ("joined", "places", "periods", "keys", "values")
    return OwnKernel(Body("write_tokens", inputs, ("written",), _WRITE))
