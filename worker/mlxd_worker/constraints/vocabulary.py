"""A model's vocabulary as the library of grammars knows it.

Invariants:
- Any thread; immutable.
- A token without bytes is never drawn under a constraint, but for those that end the text, and
  those that a grammar names by their ids.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from dataclasses import field as filled
from typing import Final

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from mlxd_shared.domain.errors import InvalidRequest
from mlxd_worker.engine.masks.constraint import Constraint, NamedTokens, trim
from mlxd_worker.engine.masks.limits import limits_of, reason
from mlxd_worker.text.tokenizer import Tokenizer

WORD_NBYTES: Final = 4


@dataclass(frozen=True, slots=True)
class TokenBytes:
    """What the tokens of a vocabulary add to a text, wherever they stand. Immutable, any thread."""

    pieces: tuple[bytes, ...]
    """The bytes of each id; empty for an id that adds no text, as a special one, or that is none.

    Those are never drawn under a constraint, but for those that end the text.
    """
    eos_ids: tuple[int, ...]
    """The ids that end a text."""


def token_bytes(tokenizer: Tokenizer, vocab_size: int) -> TokenBytes:
    """Return the bytes of the ids below `vocab_size`, as `detokenizer(anchored=True)` gives them.

    Raises:
        UnknownDecoder: the tokenizer's decoder does not say what a single token adds.
    """
    eos_ids = tuple(i for i in tokenizer.eos_ids if i < vocab_size)
    pieces = tokenizer.pieces()
    return TokenBytes(
        tuple(b"" if i in eos_ids else pieces.get(i, b"") for i in range(vocab_size)), eos_ids
    )


class Vocabulary:
    """A vocabulary as the library knows it."""

    def __init__(
        self, tokens: TokenBytes, limits: Callable[[str], LLParserLimits] = limits_of
    ) -> None:
        """Tell the library; `limits`: what it may spend on a constraint in its notation."""
        self._limits = limits
        size = len(tokens.pieces)
        words = -(-size // 32)
        eos_ids = list(tokens.eos_ids)
        if not eos_ids:  # the library wants one: an id beyond those that the model has
            eos_ids, size = [size], size + 1
        markers = (i for i, piece in enumerate(tokens.pieces) if piece[:1] == b"\xff")
        self._named = NamedTokens(tokens.eos_ids, tuple(markers))
        self._mask_nbytes = words * WORD_NBYTES
        self._tokenizer = LLTokenizer(
            TokenizerWrapper(_Adapter(tokens, size, eos_ids[0])), eos_token=eos_ids
        )

    def compile(self, source: str, field: str, *, names_tokens: bool = False) -> Constraint:
        """Return the constraint of a grammar in the library's notation.

        field: what it is called on the wire. names_tokens: whether it names tokens by their ids.

        Raises:
            InvalidRequest: the library refuses it.
        """
        matcher = LLMatcher(self._tokenizer, source, log_level=0, limits=self._limits(source))
        first_mask = b"" if matcher.is_error() else matcher.compute_bitmask()
        if matcher.is_error():
            raise InvalidRequest.of(field, reason(matcher.get_error()))
        named = self._named if names_tokens else None
        first_mask = trim(first_mask, matcher, named, nbytes=self._mask_nbytes)
        return Constraint(matcher, first_mask, field, named)


class _Adapter:
    """What the library asks a tokenizer for."""

    def __init__(self, tokens: TokenBytes, size: int, eos_id: int) -> None:
        self.tokens = [*tokens.pieces, *[b""] * (size - len(tokens.pieces))]
        self.special_token_ids = sorted({*tokens.eos_ids, eos_id})
        self.eos_token_id = eos_id
        self.bos_token_id: int | None = None

    def __call__(self, text: bytes) -> list[int]:
        """Refuse: nothing is forced, so nothing is ever tokenised."""
        raise AssertionError(f"nothing is forced, and {len(text)} bytes were to be tokenised")


@dataclass(frozen=True, slots=True)
class Spellings:
    """How a call is noticed in a text. Immutable, any thread."""

    pieces: Sequence[bytes] = filled(repr=False)
    """What each id adds to the text, control tokens their spellings."""
    ids: Mapping[bytes, int] = filled(repr=False)
    """An id of each text that is a token, but for control tokens."""


def spellings_of(tokens: TokenBytes, controls: Mapping[str, int]) -> Spellings:
    """Return how the vocabulary spells texts; controls: the ids of the spellings that steer."""
    spelled = list(tokens.pieces)
    for text, token_id in controls.items():
        spelled[token_id] = text.encode()
    ids = {text: i for i, text in enumerate(_without(controls, tokens)) if text}
    return Spellings(tuple(spelled), ids)


def call_vocabulary(
    tokens: TokenBytes, plain: Vocabulary, controls: Mapping[str, int]
) -> Vocabulary:
    """Return the vocabulary for grammars of calls, in which control tokens have no bytes.

    They are no part of any text in a call. `plain` is that of `tokens`, and serves where it can;
    another one takes as long as `plain` did.
    """
    bare = tuple(_without(controls, tokens))
    return plain if bare == tokens.pieces else Vocabulary(TokenBytes(bare, tokens.eos_ids))


def _without(controls: Mapping[str, int], tokens: TokenBytes) -> list[bytes]:
    bare = list(tokens.pieces)
    for token_id in controls.values():
        bare[token_id] = b""
    return bare
