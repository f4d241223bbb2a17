"""One operation's independent parts side by side on several cores, where MLX would use one.

On a CPU MLX runs a stream's operations one after another, and all of them but matrix products on
one core: of a decode step of 32 rows two thirds are attention and activations (see decision 0018).
Rows, slots and heads do not need each other, so they are cut into parts, each on a stream of its
own.

Invariants:
- What a part computes does not depend on the cut: the whole is the same, bit for bit, for any
  number of lanes.
- Streams belong to the thread that asks for them, like every array.
- On a GPU there is one lane: its kernels fill it by themselves.
"""

import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Final

import mlx.core as mx

from mlxd_shared.domain.fast_paths import FastPath
from mlxd_worker.kernels.device import runs_cpu
from mlxd_worker.kernels.switches import SWITCHES
from mlxd_worker.machine.cores import available_cores

LANES_MAX: Final = 8
"""More would not help: memory is then the bound, and each costs a thread."""

LANE_VALUES_MIN: Final = 1 << 15
"""Exponentials a lane is worth: they take some 0.2 ms, handing over and back some 0.03 ms."""


_of_this_thread = threading.local()


def lanes() -> Sequence[mx.Stream]:
    """Return this thread's streams, made when it first asks, the default one first."""
    streams: list[mx.Stream] = vars(_of_this_thread).setdefault("streams", [])
    if not streams:
        count = min(available_cores(), LANES_MAX) if runs_cpu() else 1
        default = mx.default_stream(mx.default_device())
        streams += [default, *(mx.new_stream(mx.cpu) for _ in range(count - 1))]
    return streams


def side_by_side(
    work: Callable[[slice], mx.array], *, count: int, values: int, axis: int
) -> mx.array:
    """Return what `work` makes of [0, count), lazy: of parts of it, joined along `axis`.

    work: takes a part of the range; what it returns for the parts, joined, is what it returns for
    the whole. values: how many values all of it computes slowly, which says how many lanes pay.
    """
    streams = lanes()
    most = len(streams) if SWITCHES.is_on(FastPath.LANES) else 1
    parts = parts_of(count, lanes=min(most, values // LANE_VALUES_MIN))
    if len(parts) == 1:
        return work(parts[0])
    results = []
    for part, stream in zip(parts, streams, strict=False):
        with mx.stream(stream):
            results.append(work(part))
    return mx.concatenate(results, axis=axis)


def parts_of(count: int, *, lanes: int) -> list[slice]:
    """Return [0, count) in at most `lanes` parts, at least one, whose sizes differ by 1 at most."""
    parts = max(min(lanes, count), 1)
    ends = [count * index // parts for index in range(parts + 1)]
    return [slice(start, stop) for start, stop in itertools.pairwise(ends)]
