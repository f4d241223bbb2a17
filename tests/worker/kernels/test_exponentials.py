"""Exponentials as powers of two: MLX's own values, and each row by itself."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import pytest

from mlxd_worker.kernels import exponentials

Unary = Callable[[mx.array], mx.array]
VALUES = [-mx.inf, -1e30, -104.0, -88.0, -20.0, -1.5, -0.0, 0.0, 1e-7, 3.0, 20.0, 88.0, 1e30]


def near(actual: mx.array, expected: mx.array) -> bool:
    """Tell whether two ways to compute a thing have come to the same."""
    return bool(mx.allclose(actual, expected, rtol=2e-6, atol=1e-7).item())


def _silu(array: mx.array) -> mx.array:
    return array * mx.sigmoid(array)


@pytest.mark.parametrize(
    ("ours", "own"),
    [(exponentials.sigmoid, mx.sigmoid), (exponentials.silu, _silu)],
    ids=["sigmoid", "silu"],
)
def test_activations_are_mlx_s_own(ours: Unary, own: Unary) -> None:
    """They agree over all of float32's range, and what is no number stays none."""
    values = mx.array([*VALUES[1:], *(0.37 * i for i in range(-200, 200))])

    assert near(ours(values), own(values))
    assert mx.isnan(ours(mx.array([mx.nan]))).item()
    assert ours(values.astype(mx.float16)).dtype == mx.float16


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=["powers", "own"])
def test_softmax_is_mlx_s_own(dtype: mx.Dtype) -> None:
    """Hidden scores take nothing, one score takes all, and large ones do not overflow."""
    scores = 9 * mx.random.normal((4, 3, 1, 65), key=mx.random.key(3)).astype(dtype)
    scores[0, 0, 0, 5:] = -mx.inf
    scores[1, 0, 0, 1:] = -mx.inf
    scores[2] = scores[2] + 3e4

    actual = exponentials.softmax(scores)

    assert actual.dtype == dtype
    assert near(actual, mx.softmax(scores, axis=-1, precise=True))
    assert actual[1, 0, 0, 0].item() == 1.0
    assert mx.all(actual[0, 0, 0, 5:] == 0).item()


@pytest.mark.parametrize("beside", [-mx.inf, -3.0, 40.0])
def test_one_score_more_takes_its_share(beside: float) -> None:
    """What is left is the softmax of all, without it."""
    scores = 5 * mx.random.normal((2, 4, 1, 33), key=mx.random.key(4))
    other = mx.full((1, 4, 1, 1), beside)

    actual = exponentials.softmax_beside(scores, other)

    joined = mx.concatenate([scores, mx.broadcast_to(other, (2, 4, 1, 1))], axis=-1)
    assert near(actual, mx.softmax(joined, axis=-1)[..., :-1])


def test_a_row_has_the_same_bits_alone_and_beside_others() -> None:
    """Neither the batch nor hidden positions behind it change a row."""
    scores = 4 * mx.random.normal((16, 8, 1, 200), key=mx.random.key(5))
    scores[3, :, :, 77:] = -mx.inf

    together = exponentials.softmax_of_powers(scores)
    alone = exponentials.softmax_of_powers(scores[3:4])

    assert mx.array_equal(together[3:4], alone)
