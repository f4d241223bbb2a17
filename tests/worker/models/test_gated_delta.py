"""The gated delta rule in blocks against the rule itself, token by token, in double precision."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest

from mlxd_worker.models.families.gated_delta import BLOCK_TOKENS, DeltaInputs, gated_delta

Array = npt.NDArray[np.float64]
TOLERANCE = 2e-5
KEY_DIM, VALUE_DIM = 8, 12


def draw_inputs(rows: int, tokens: int, *, key_heads: int, shared: int, seed: int) -> list[Array]:
    """Return queries, keys, values, log decays and rates as a model makes them."""
    draws = np.random.Generator(np.random.PCG64(seed))
    heads = key_heads * shared
    queries, keys = draws.standard_normal((2, rows, tokens, key_heads, KEY_DIM))
    return [
        queries / np.linalg.norm(queries, axis=-1, keepdims=True),
        keys / np.linalg.norm(keys, axis=-1, keepdims=True),
        draws.standard_normal((rows, tokens, heads, VALUE_DIM)),
        -draws.exponential(0.3, (rows, tokens, heads)),
        draws.uniform(0, 1, (rows, tokens, heads)),
    ]


def by_the_rule(inputs: list[Array], state: Array) -> tuple[Array, Array]:
    """Return results and state, one token after another."""
    queries, keys, values, log_decays, rates = inputs
    shared = values.shape[2] // keys.shape[2]
    queries, keys = (np.repeat(array, shared, axis=2) for array in (queries, keys))
    results = []
    for token in range(values.shape[1]):
        state = state * np.exp(log_decays[:, token])[..., None, None]
        held = np.einsum("nhvk,nhk->nhv", state, keys[:, token])
        learnt = rates[:, token, :, None] * (values[:, token] - held)
        state = state + learnt[..., None] * keys[:, token, :, None]
        results.append(np.einsum("nhvk,nhk->nhv", state, queries[:, token]))
    return np.stack(results, axis=1), state


def assert_follows(inputs: list[Array], state: Array) -> None:
    """Compare with the rule, relative to the largest value."""
    expected = by_the_rule(inputs, state)
    got = gated_delta(DeltaInputs(*(mx.array(a.astype(np.float32)) for a in inputs)), mx.array(
        state.astype(np.float32)
    ))  # fmt: skip
    for array, wanted in zip(got, expected, strict=True):
        assert array.dtype == mx.float32
        assert array.shape == wanted.shape
        error = np.abs(np.array(array) - wanted).max()
        assert error <= TOLERANCE * max(1.0, np.abs(wanted).max())


@pytest.mark.parametrize("shared", [1, 3])
@pytest.mark.parametrize(
    "tokens", [1, 2, 3, 5, 31, BLOCK_TOKENS, BLOCK_TOKENS + 1, 3 * BLOCK_TOKENS, 100]
)
def test_any_number_of_tokens_follows_the_rule(tokens: int, shared: int) -> None:
    """However many tokens at once, results and state are those of one token after another."""
    inputs = draw_inputs(2, tokens, key_heads=2, shared=shared, seed=tokens)
    state = np.random.Generator(np.random.PCG64(1)).standard_normal(
        (2, 2 * shared, VALUE_DIM, KEY_DIM)
    )

    assert_follows(inputs, state)


def test_one_token_said_again_and_again_stays_exact() -> None:
    """Equal keys, full rates and no decay: the worst case for inverting the block's system."""
    inputs = draw_inputs(1, 4 * BLOCK_TOKENS, key_heads=1, shared=2, seed=3)
    inputs[1][:] = inputs[1][:, :1]
    inputs[3][:] = 0
    inputs[4][:] = 1

    assert_follows(inputs, np.ones((1, 2, VALUE_DIM, KEY_DIM)))


@pytest.mark.parametrize("log_decay", [0.0, -1e-6, -30.0, -400.0])
def test_no_decay_and_total_decay_are_finite(log_decay: float) -> None:
    """A head that forgets nothing and one that forgets all at once, whatever came before."""
    inputs = draw_inputs(1, 70, key_heads=1, shared=2, seed=4)
    inputs[3][:, :, 0] = log_decay
    inputs[3][:, 35, 1] = log_decay

    assert_follows(inputs, np.ones((1, 2, VALUE_DIM, KEY_DIM)))


def test_a_text_cut_anywhere_ends_in_the_same_state() -> None:
    """Chunks, single tokens and the whole text at once give the same results and state."""
    inputs = [mx.array(a.astype(np.float32))
              for a in draw_inputs(2, 90, key_heads=2, shared=2, seed=5)]  # fmt: skip
    start = mx.zeros((2, 4, VALUE_DIM, KEY_DIM))
    whole, ended = gated_delta(DeltaInputs(*inputs), start)

    parts, state, begin = [], start, 0
    for end in (1, 2, 40, 41, 73, 90):
        part, state = gated_delta(DeltaInputs(*(a[:, begin:end] for a in inputs)), state)
        parts.append(part)
        begin = end

    assert mx.allclose(mx.concatenate(parts, axis=1), whole, rtol=0, atol=1e-5)
    assert mx.allclose(state, ended, rtol=0, atol=1e-5)
