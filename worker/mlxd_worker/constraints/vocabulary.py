"""A model's vocabulary as constraints need it: the bytes of each token, and what ends a text.

Invariants:
- The bytes are those that `Tokenizer.detokenizer(anchored=True)` gives out: a token has the same
  ones wherever it stands.
- A special token adds no text, whatever its spelling; nor does an id that the tokenizer does not
  have. Neither is ever drawn under a constraint, but for those that end the text.
"""

from __future__ import annotations

from dataclasses import dataclass

from mlxd_worker.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class TokenBytes:
    """What the tokens of a vocabulary add to a text. Immutable, any thread."""

    pieces: tuple[bytes, ...]
    """The bytes of each id; empty for an id that adds no text."""
    eos_ids: tuple[int, ...]
    """The ids that end a text."""


def token_bytes(tokenizer: Tokenizer, vocab_size: int) -> TokenBytes:
    """Return the bytes of the ids below `vocab_size`, which is the model's.

    Raises:
        UnknownDecoder: the tokenizer's decoder does not say what a single token adds.
    """
    eos_ids = tuple(i for i in tokenizer.eos_ids if i < vocab_size)
    pieces = tokenizer.pieces()
    return TokenBytes(
        tuple(b"" if i in eos_ids else pieces.get(i, b"") for i in range(vocab_size)), eos_ids
    )
