"""A row's keys and values copied by kernels: all layers' out of arenas, a layer's into one; CUDA.

Invariants:
- What is put is written IN PLACE, into arrays that MLX knows as inputs, on the conditions of
  `decode_attention`. MLX sees no order among such kernels: who dispatches the result before
  anything else reads the arena has all of it there, since what is dispatched runs in that order.
- MLX's own writes have to be waited for, and take most of a millisecond each; its copies of a range
  are four operations an array.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import mlx.core as mx

from mlxd_shared.domain.fast_paths import FastPath
from mlxd_worker.kernels.device import HALVES, runs_cuda
from mlxd_worker.kernels.nvrtc import find_compiler
from mlxd_worker.kernels.own import Body, OwnKernel
from mlxd_worker.kernels.switches import SWITCHES

VECTOR = 8
"""Values that a thread copies at once: 16 bytes."""

THREADS = 256
BLOCKS_MAX = 64
"""Of one head: so many keep the device busy with eight heads."""

WRITTEN = 8
"""Length of the result of a put; of its own it says nothing."""

LAYERS_AT_ONCE = 40
"""Layers that one launch copies: two addresses each, 640 bytes of the 4 KB that it may take."""

_COPY = """
  constexpr int EACH = D / 8;
  const int head = blockIdx.y, first = blockIdx.x * blockDim.x + threadIdx.x;
  const long long from = (((long long)from_slot * KV + head) * from_length + from_start) * EACH;
  const long long to = (((long long)to_slot * KV + head) * to_length + to_start) * EACH;
  const uint4* given_keys = reinterpret_cast<const uint4*>(keys) + from;
  const uint4* given_values = reinterpret_cast<const uint4*>(values) + from;
  uint4* made_keys = reinterpret_cast<uint4*>(TARGET_KEYS) + to;
  uint4* made_values = reinterpret_cast<uint4*>(TARGET_VALUES) + to;
  for (int i = first; i < count * EACH; i += gridDim.x * blockDim.x) {
    made_keys[i] = given_keys[i];
    made_values[i] = given_values[i];
  }
"""
_WRITTEN = f"  if (head == 0 && first < {WRITTEN}) written[first] = 1;\n"
_SCALARS = (
    *("from_slot", "from_length", "from_start"),
    *("to_slot", "to_length", "to_start", "count"),
)


@dataclass(frozen=True, slots=True)
class Range:
    """Where a row's positions lie in a pair of arrays `[slots, kv_heads, length, head_dim]`."""

    keys: mx.array
    values: mx.array
    slot: int
    start: int


def serves(*, head_dim: int, value_dim: int, dtype: mx.Dtype) -> bool:
    """Return whether `copy_range` and `put_range` can do this: beside the decode kernel alone."""
    fits = dtype in HALVES and head_dim == value_dim and head_dim % VECTOR == 0
    able = fits and runs_cuda() and SWITCHES.is_on(FastPath.DECODE_KERNEL)
    return able and find_compiler() is not None


def copy_range(
    source: Range, count: int, *, after: mx.array | None = None
) -> tuple[mx.array, mx.array]:
    """Return `count` positions of keys and values, `[1, kv_heads, count, head_dim]`, lazy.

    after: the result of a put that has to be done before.
    """
    _, heads, length, head_dim = source.keys.shape
    shape = (1, heads, count, head_dim)
    arrays = [source.keys, source.values]
    keys, values = _copy_kernel(follows=after is not None)(
        inputs=arrays if after is None else [*arrays, after],
        output_shapes=[shape, shape],
        output_dtypes=[source.keys.dtype] * 2,
        grid=(_blocks(count, head_dim) * THREADS, heads, 1),
        threadgroup=(THREADS, 1, 1),
        template=_constants(source.keys),
        scalars=[source.slot, length, source.start, 0, count, 0, count],
    )
    return keys, values


def copy_ranges(sources: Sequence[Range], count: int) -> list[tuple[mx.array, mx.array]]:
    """Return `count` positions of each layer's row, stacked: `[layers, kv_heads, count, head_dim]`.

    One kernel and one pair for each `LAYERS_AT_ONCE` layers; lazy. All are of one shape and type,
    and their rows lie alike (`are_alike`).
    """
    copies: list[tuple[mx.array, mx.array]] = []
    for first in range(0, len(sources), LAYERS_AT_ONCE):
        some = sources[first : first + LAYERS_AT_ONCE]
        if len(some) == 1:
            copies.append(copy_range(some[0], count))
            continue
        _, heads, length, head_dim = some[0].keys.shape
        # One kernel serves any number: what it is given of others, it has no blocks for.
        filled = [*some, *[some[0]] * (LAYERS_AT_ONCE - len(some))]
        keys, values = _layers_kernel()(
            inputs=[array for its in filled for array in (its.keys, its.values)],
            output_shapes=[(len(some), heads, count, head_dim)] * 2,
            output_dtypes=[some[0].keys.dtype] * 2,
            grid=(_blocks(count, head_dim) * THREADS, heads, len(some)),
            threadgroup=(THREADS, 1, 1),
            template=_constants(some[0].keys),
            scalars=[some[0].slot, length, some[0].start, 0, count, 0, count],
        )
        copies.append((keys, values))
    return copies


def are_alike(ranges: Sequence[Range]) -> bool:
    """Tell whether rows lie alike in arrays that are alike."""
    return len({(its.keys.shape, its.keys.dtype, its.slot, its.start) for its in ranges}) == 1


def put_range(source: Range, target: Range, count: int) -> mx.array:
    """Write `count` positions of `source` into `target`; return what says that they are, lazy.

    Both may be of one pair of arrays, if the positions are not.
    """
    _, heads, length, head_dim = source.keys.shape
    _, _, capacity, _ = target.keys.shape
    (written,) = _put_kernel()(
        inputs=[source.keys, source.values, target.keys, target.values],
        output_shapes=[(WRITTEN,)],
        output_dtypes=[mx.int32],
        grid=(_blocks(count, head_dim) * THREADS, heads, 1),
        threadgroup=(THREADS, 1, 1),
        template=_constants(target.keys),
        scalars=[
            *(source.slot, length, source.start),
            *(target.slot, capacity, target.start, count),
        ],
    )
    return written


def _blocks(count: int, head_dim: int) -> int:
    return max(min(-(-count * head_dim // (VECTOR * THREADS)), BLOCKS_MAX), 1)


def _constants(keys: mx.array) -> list[tuple[str, int | bool | mx.Dtype]]:
    _, heads, _, head_dim = keys.shape
    return [("T", keys.dtype), ("KV", heads), ("D", head_dim)]


@cache
def _copy_kernel(*, follows: bool) -> OwnKernel:
    text = _COPY.replace("TARGET_KEYS", "out_keys").replace("TARGET_VALUES", "out_values")
    inputs = ("keys", "values", "after") if follows else ("keys", "values")
    outputs = ("out_keys", "out_values")
    return OwnKernel(Body("copy_range", inputs, outputs, text, scalars=_SCALARS))


@cache
def _layers_kernel() -> OwnKernel:
    inputs = tuple(f"{part}_{at}" for at in range(LAYERS_AT_ONCE) for part in ("keys", "values"))
    cases = "".join(
        f"    case {at}: keys = keys_{at}; values = values_{at}; break;\n"
        for at in range(LAYERS_AT_ONCE)
    )
    chosen = "  const T *keys = nullptr, *values = nullptr;\n"
    chosen += f"  switch (blockIdx.z) {{\n{cases}  }}\n"
    chosen += "  const long long before = (long long)blockIdx.z * KV * to_length * D;\n"
    text = _COPY.replace("TARGET_KEYS", "out_keys + before")
    text = text.replace("TARGET_VALUES", "out_values + before")
    outputs = ("out_keys", "out_values")
    return OwnKernel(Body("copy_layers", inputs, outputs, chosen + text, scalars=_SCALARS))


@cache
def _put_kernel() -> OwnKernel:
    text = _COPY.replace("TARGET_KEYS", "const_cast<T*>(into_keys)")
    text = text.replace("TARGET_VALUES", "const_cast<T*>(into_values)") + _WRITTEN
    inputs = ("keys", "values", "into_keys", "into_values")
    return OwnKernel(Body("put_range", inputs, ("written",), text, scalars=_SCALARS))
