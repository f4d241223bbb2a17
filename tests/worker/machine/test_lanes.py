"""Parts that run side by side: the same bits as the whole, and in-place writes stay in place."""

from __future__ import annotations

import mlx.core as mx
import pytest

from mlxd_models.sizes.pass_sizes import BLOCK_QUERIES
from mlxd_worker.cache.layers.attention import attend_chunk, attend_slots
from mlxd_worker.kernels.exponentials import (
    LOG2_E,
    by_powers,
    softmax_of_powers,
    times_sigmoid,
)
from mlxd_worker.machine.lanes import LANE_VALUES_MIN, parts_of, side_by_side
from mlxd_worker.models.weights.fused import gated_halves
from tests.support.mlx_memory import live_nbytes

SCALE = 0.125


@pytest.mark.parametrize("lanes", [0, 1, 2, 3, 8])
@pytest.mark.parametrize("count", [1, 2, 7, 32])
def test_parts_cover_everything_once_and_alike(lanes: int, count: int) -> None:
    """Parts follow each other without a gap, none is empty, and sizes differ by one at most."""
    parts = parts_of(count, lanes=lanes)
    sizes = [part.stop - part.start for part in parts]

    assert [index for part in parts for index in range(count)[part]] == list(range(count))
    assert len(parts) == max(1, min(lanes, count))
    assert max(sizes) - min(sizes) <= 1


def test_little_work_stays_whole() -> None:
    """Below what a lane is worth nothing is cut."""
    seen: list[slice] = []

    def work(part: slice) -> mx.array:
        seen.append(part)
        return mx.zeros(part.stop - part.start)

    side_by_side(work, count=8, values=2 * LANE_VALUES_MIN - 1, axis=0)

    assert seen == [slice(0, 8)]


def test_slots_attended_side_by_side_have_the_bits_of_one_call() -> None:
    """Lanes do not change what a slot reads."""
    queries, keys, values = _random(32, 8, 1), _random(32, 4, 192), _random(32, 4, 192)
    mask = mx.where(mx.arange(192) > 4 * mx.arange(32)[:, None] + 30, -mx.inf, 0.0)[:, None, None]

    attended = attend_slots(queries, keys, values, mask, scale=SCALE)
    exponents = (queries.reshape(32, 4, 2, 32) * (SCALE * LOG2_E)) @ keys.swapaxes(-1, -2)
    whole = softmax_of_powers(exponents + mask) @ values
    fused = mx.fast.scaled_dot_product_attention(
        queries, keys, values, scale=SCALE, mask=mx.broadcast_to(mask, (32, 8, 1, 192))
    )

    assert mx.array_equal(attended, whole.reshape(32, 8, 1, 32) if by_powers() else fused)
    assert mx.allclose(attended, fused, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("width", [1, 2, BLOCK_QUERIES, BLOCK_QUERIES + 1, 3 * BLOCK_QUERIES - 5])
@pytest.mark.parametrize("before", [0, 77])
def test_a_chunk_attended_in_blocks_reads_what_one_call_does(width: int, before: int) -> None:
    """Each query of a chunk sees all positions up to its own, in whichever block it stands."""
    length = before + width
    queries, keys, values = _random(1, 8, width), _random(1, 4, 512), _random(1, 4, 512)

    attended = attend_chunk(queries, keys, values, length=length, scale=SCALE)
    whole = mx.fast.scaled_dot_product_attention(
        queries, keys[:, :, :length], values[:, :, :length], scale=SCALE, mask="causal"
    )

    assert mx.allclose(attended, whole, rtol=1e-5, atol=1e-6)


def test_activations_side_by_side_have_the_bits_of_one_call() -> None:
    """Lanes do not change what a row becomes."""
    both = mx.random.normal((33, 2 * 1376), key=mx.random.key(1))
    gate, up = both[:, :1376], both[:, 1376:]

    activated = gated_halves(both, width=1376)

    assert mx.array_equal(activated, times_sigmoid(gate * up, gate))
    assert mx.allclose(activated, gate * mx.sigmoid(gate) * up, rtol=1e-5, atol=1e-6)


def test_what_lanes_have_read_is_written_in_place_afterwards() -> None:
    """No lane holds on to an arena once its step is evaluated: the next write copies nothing."""
    keys = mx.zeros((32, 8, 512, 64))
    mx.eval(keys)
    mask, queries = mx.zeros((32, 1, 1, 512)), mx.ones((32, 8, 1, 64))
    mx.eval(mask, queries)
    for step in range(4):
        keys[:, :, step] = mx.full((32, 8, 64), float(step))
        read = attend_slots(queries, keys, keys, mask, scale=SCALE)
        before_nbytes = live_nbytes()
        mx.eval(read, keys)
        del read
        grown_nbytes = mx.get_peak_memory() - before_nbytes

        assert grown_nbytes < keys.nbytes // 2, step


def _random(*shape: int) -> mx.array:
    return mx.random.normal((*shape, 32), key=mx.random.key(sum(shape)))
