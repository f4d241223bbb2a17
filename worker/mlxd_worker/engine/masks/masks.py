"""Which tokens a row may draw, as packed bits, and what that does to the logits.

Invariants:
- A token that a mask leaves out gets -inf; every other logit keeps its bits, and so do the rows
  without a mask.
- A mask is plain bytes, never an array, so it may be made on any thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import mlx.core as mx

WORD_BITS: Final = 32


@dataclass(frozen=True, slots=True)
class AllowedTokens:
    """The tokens that one draw may give.

    Bit `t % 32` of the little-endian 32-bit word `t // 32` stands for token t; there are as many
    words as the vocabulary takes, and bits beyond it mean nothing.
    """

    words: bytes | memoryview


def words_count(vocab_size: int) -> int:
    """Return how many 32-bit words a vocabulary takes."""
    return -(-vocab_size // WORD_BITS)


def mask_logits(logits: mx.array, masks: Sequence[AllowedTokens | None]) -> mx.array:
    """Return logits [N, V] with -inf where a row's mask does not allow a token, lazy.

    masks: one a row, None for a row that may draw any token. The result is the input itself where
    no row has one. The bytes are copied before it returns.
    """
    asking = [(row, mask) for row, mask in enumerate(masks) if mask is not None]
    if not asking:
        return logits
    rows_count, vocab_size = logits.shape
    width = words_count(vocab_size)
    joined = b"".join(mask.words for _, mask in asking)
    assert len(joined) == len(asking) * width * 4, "a mask of another vocabulary"
    packed = memoryview(joined).cast("I", shape=(len(asking), width))
    words = mx.array(packed)  # type: ignore[arg-type]  # its stubs know no buffers
    bits = (words[:, :, None] >> mx.arange(WORD_BITS, dtype=mx.uint32)) & 1
    allowed = bits.reshape(len(asking), -1)[:, :vocab_size] != 0
    if len(asking) == rows_count:
        return mx.where(allowed, logits, -mx.inf)
    at = mx.array([row for row, _ in asking], dtype=mx.uint32)
    result = logits[:]  # an object of its own: the caller's keeps its values
    result[at] = mx.where(allowed, logits[at], -mx.inf)
    return result
