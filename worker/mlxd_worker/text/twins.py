"""Tokenizers that differ in their added tokens alone, and share everything else.

Invariants:
- A twin has the ids of the tokenizer that it was made of, for every token.
- It takes no copy of the vocabulary: model and normaliser are the same objects of the library.
- Neither is changed behind that: a tokenizer is immutable once it is loaded.
"""

from __future__ import annotations

from collections.abc import Collection

from tokenizers import AddedToken
from tokenizers import Tokenizer as RawTokenizer


def twin_of(raw: RawTokenizer, *, special: Collection[str] = ()) -> RawTokenizer:
    """Return a tokenizer that encodes as `raw` does, without its post-processor and decoder.

    special: spellings of added tokens that are special to the twin, whatever they are to `raw`.
    """
    twin = RawTokenizer(raw.model)
    if raw.normalizer is not None:  # before the tokens, which are looked for in its normal form
        twin.normalizer = raw.normalizer
    if raw.pre_tokenizer is not None:
        twin.pre_tokenizer = raw.pre_tokenizer
    added = raw.get_added_tokens_decoder()
    # In the order of their ids, as from a file: what the model lacks is numbered as it comes.
    twin.add_tokens(
        [
            copy_of(token, special=token.special or token.content in special)
            for _, token in sorted(added.items())
        ]
    )
    assert twin.get_added_tokens_decoder().keys() == added.keys(), "ids go by order"
    return twin


def copy_of(token: AddedToken, *, content: str | None = None, special: bool) -> AddedToken:
    """Return an added token that is found as `token` is, spelled otherwise where `content` is."""
    return AddedToken(
        token.content if content is None else content,
        single_word=token.single_word,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        normalized=token.normalized,
        special=special,
    )
