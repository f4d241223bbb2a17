"""The text of ids within a bound: told by what their tokens spell, before the text is made.

One id may stand for TOKENIZER_PIECE_CHARS_MAX characters and a request may have millions of ids,
so that a text can be a thousand times as large as the request, and take several times that while
the library joins it.
"""

from __future__ import annotations

from array import array
from collections import Counter

from mlxd_shared import config
from mlxd_worker.text.tokenizer import Tokenizer


class TooLong(Exception):
    """A text that is not given out; what is wrong with it."""


def text_of(
    tokenizer: Tokenizer,
    ids: array[int],
    *,
    skip_special: bool,
    nbytes_max: int = config.PROMPT_BYTES_MAX,
) -> str:
    """Return the text of ids; see `Tokenizer.decode`.

    It is not made at all where the tokens spell twice as much: it may be somewhat shorter than
    what they spell, by a blank at its start, but not by half.

    Raises:
        TooLong: it has more than `nbytes_max` bytes in UTF-8.
        InvalidModel: as `Tokenizer.decode`.
    """
    if tokenizer.spells and _spell_more(tokenizer, ids, 2 * nbytes_max, skip_special=skip_special):
        raise TooLong(f"their tokens spell over {2 * nbytes_max} bytes; at most {nbytes_max}")
    text = tokenizer.decode(ids.tolist(), skip_special=skip_special)
    nbytes = len(text) if text.isascii() else len(text.encode())
    if nbytes > nbytes_max:
        raise TooLong(f"their text has {nbytes} bytes; at most {nbytes_max}")
    return text


def is_short(tokenizer: Tokenizer, ids: array[int]) -> bool:
    """Tell whether no text of so many ids can surprise, in time or in memory.

    Where a token's bytes depend on others, the decoder may make TOKENIZER_GROWTH_SHORT_MAX of one.
    """
    chars_max = config.PROMPT_CHARS_MAX if tokenizer.spells else config.TOKENIZE_SHORT_CHARS_MAX
    return (
        tokenizer.is_plain
        and len(ids) <= config.TOKENIZE_SHORT_IDS_MAX
        and len(ids) * tokenizer.piece_chars_max <= chars_max
    )


def _spell_more(
    tokenizer: Tokenizer, ids: array[int], nbytes_max: int, *, skip_special: bool
) -> bool:
    """Tell whether ids' tokens spell more than so many bytes; looks at each token once."""
    nbytes = 0
    for token_id, count in Counter(ids).items():
        if skip_special and token_id in tokenizer.special_ids:
            continue
        nbytes += count * tokenizer.written_nbytes(token_id)
        if nbytes > nbytes_max:
            return True
    return False
