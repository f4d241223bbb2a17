"""Packed masks: bit by bit, at any width, and no business of a row without one."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxd_worker.engine.masks.masks import AllowedTokens, mask_logits, words_count


@given(
    vocab_size=st.sampled_from([1, 31, 32, 33, 64, 100]),
    rows=st.lists(st.one_of(st.none(), st.sets(st.integers(0, 99))), min_size=1, max_size=4),
)
def test_each_bit_stands_for_its_token(vocab_size: int, rows: list[set[int] | None]) -> None:
    """A bit that is set keeps the logit bit for bit, one that is not makes it -inf."""
    width = 4 * words_count(vocab_size)
    logits = mx.random.normal((len(rows), vocab_size), key=mx.random.key(1))
    masks = []
    for index, row in enumerate(rows):
        bits = sum(1 << token for token in row if token < 8 * width) if row is not None else 0
        packed = bits.to_bytes(width, "little")
        mask = AllowedTokens(memoryview(packed) if index % 2 else packed)
        masks.append(None if row is None else mask)
    expected = np.array(logits)
    for values, row in zip(expected, rows, strict=True):
        if row is not None:
            values[[token for token in range(vocab_size) if token not in row]] = -np.inf
    assert np.array_equal(np.array(mask_logits(logits, masks)), expected)


def test_without_masks_the_logits_are_the_same_object() -> None:
    """A step without constraints pays nothing."""
    logits = mx.zeros((2, 9))
    assert mask_logits(logits, [None, None]) is logits


def test_a_mask_of_another_vocabulary_is_a_bug() -> None:
    """As many words as the vocabulary takes, no more and no less."""
    with pytest.raises(AssertionError, match="another vocabulary"):
        mask_logits(mx.zeros((1, 33)), [AllowedTokens(bytes(4))])
