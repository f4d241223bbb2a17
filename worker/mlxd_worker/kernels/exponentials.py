"""What attention and activations make of exponentials, as fast as a CPU makes them.

MLX's loops on a Linux CPU are scalar: an exponential takes 11 ns there, a sigmoid 16. A power of
two, which the C library computes, takes 4 (Zen 5; within one unit in the last place). So on such a
CPU exponentials are powers of two of scaled exponents.

Invariants:
- A value depends on its own row of `scores`, or on itself, alone: it is the same in any batch.
- Infinities and what is no number go the same ways as in MLX's own operations.
"""

import math
import sys
from functools import cache
from typing import Final

import mlx.core as mx

from mlxd_shared.domain.fast_paths import FastPath
from mlxd_worker.kernels.device import runs_cpu
from mlxd_worker.kernels.switches import SWITCHES

LOG2_E: Final = math.log2(math.e)


def by_powers() -> bool:
    """Return whether powers of two are the exponentials: on a Linux CPU, which has them faster."""
    return _powers_are_faster() and SWITCHES.is_on(FastPath.EXPONENTIALS)


@cache
def _powers_are_faster() -> bool:
    return sys.platform == "linux" and runs_cpu()


def sigmoid(array: mx.array) -> mx.array:
    """Return 1 / (1 + e^-x) of each value, lazy."""
    if not _serves(array):
        return mx.sigmoid(array)
    return mx.reciprocal(1.0 + mx.power(2.0, array * -LOG2_E))


def times_sigmoid(array: mx.array, exponents: mx.array) -> mx.array:
    """Return `x / (1 + e^-y)` of each value x and its exponent y, lazy."""
    if not _serves(exponents):
        return array * mx.sigmoid(exponents)
    return array / (1.0 + mx.power(2.0, exponents * -LOG2_E))


def silu(array: mx.array) -> mx.array:
    """Return x / (1 + e^-x) of each value, lazy."""
    return times_sigmoid(array, array)


def softmax(scores: mx.array) -> mx.array:
    """Return the softmax of `[..., span]` scores along the last axis, in float32 at least, lazy."""
    if not _serves(scores):
        return mx.softmax(scores, axis=-1, precise=True)
    return _shares(scores, LOG2_E)


def softmax_beside(scores: mx.array, beside: mx.array) -> mx.array:
    """Return the softmax of `[..., span]` scores and one more, `[..., 1]`, without that one; lazy.

    It is computed in float32 and has the scores' type.
    """
    exact, other = scores.astype(mx.float32), beside.astype(mx.float32)
    if by_powers():
        return _shares(exact, LOG2_E, other).astype(scores.dtype)
    total = mx.logsumexp(exact, axis=-1, keepdims=True)
    return mx.exp(exact - mx.logaddexp(total, other)).astype(scores.dtype)


def softmax_of_powers(exponents: mx.array) -> mx.array:
    """Return `2^x` of each of `[..., span]` exponents by their sum, lazy.

    For scores that come multiplied by `LOG2_E`: that is one operation less.
    """
    return _shares(exponents, 1.0)


def _shares(scores: mx.array, steepness: float, beside: mx.array | None = None) -> mx.array:
    most = mx.max(scores, axis=-1, keepdims=True)
    most = most if beside is None else mx.maximum(most, beside)
    powers = _powers(scores - most, steepness)
    total = mx.sum(powers, axis=-1, keepdims=True)
    return powers / (total if beside is None else total + _powers(beside - most, steepness))


def _powers(differences: mx.array, steepness: float) -> mx.array:
    # Multiplied after the subtraction: before, large scores would lose digits.
    return mx.power(2.0, differences if steepness == 1.0 else differences * steepness)


def _serves(array: mx.array) -> bool:
    return array.dtype == mx.float32 and by_powers()
