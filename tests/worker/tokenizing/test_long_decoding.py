"""The text of ids is bounded before it is made, wherever it is made."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from tokenizers import AddedToken, decoders
from tokenizers import Tokenizer as RawTokenizer

from mlxd_shared import config
from mlxd_shared.domain.errors import InvalidRequest
from mlxd_worker.text.tokenizer import Tokenizer
from mlxd_worker.tokenizing.process import GOOD, IDS, LONG, Desk, TooLong, message, text_of
from mlxd_worker.tokenizing.room import TokenRoom
from tests.worker.made_tokenizers import byte_fallback, byte_level

NEVER = ("/nowhere/at/all",)
PIECE = "x" * config.TOKENIZER_PIECE_CHARS_MAX
MOST = config.PROMPT_BYTES_MAX // len(PIECE)
"""Tokens of that spelling, which make the longest text that is given out."""


class Counting(Tokenizer):
    """Counts the ids that the library is given to write."""

    decoded = 0

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Count them."""
        self.decoded += len(ids)
        return super().decode(ids, skip_special=skip_special)


def tokenizer_of(raw: RawTokenizer, *, special: bool = False, plain: bool = True) -> Counting:
    """Return a tokenizer with a token of PIECE."""
    raw.add_tokens([AddedToken(PIECE, special=special, normalized=False)])
    return Counting(raw, bos_id=None, add_bos=None, eos_ids=(), is_plain=plain)


def ids_of(tokenizer: Tokenizer, count: int) -> array[int]:
    (token_id,) = (i for i, text in tokenizer._added.items() if text == PIECE)
    return array(IDS, [token_id]) * count


@pytest.mark.parametrize("raw", [byte_level, byte_fallback])
def test_a_text_that_is_far_too_long_is_never_made(raw: Callable[[], RawTokenizer]) -> None:
    """What its tokens spell says so; one that is a little too long is looked at."""
    tokenizer = tokenizer_of(raw())
    with pytest.raises(TooLong, match="their tokens spell over 33554432 bytes; at most 16777216"):
        text_of(tokenizer, ids_of(tokenizer, config.TOKENIZE_IDS_MAX), skip_special=True)
    assert tokenizer.decoded == 0
    a_little = ids_of(tokenizer, MOST) + array(IDS, tokenizer.encode("ab"))
    with pytest.raises(TooLong, match=r"their text has \d+ bytes; at most 16777216"):
        text_of(tokenizer, a_little, skip_special=True)
    assert text_of(tokenizer, ids_of(tokenizer, MOST), skip_special=True) == PIECE * MOST


def test_what_is_left_out_of_a_text_does_not_count() -> None:
    """Special tokens, where the text is written without them."""
    tokenizer = tokenizer_of(byte_level(), special=True)
    ids = ids_of(tokenizer, 3 * MOST) + array(IDS, tokenizer.encode("ab"))
    assert text_of(tokenizer, ids, skip_special=True) == "ab"
    with pytest.raises(TooLong):
        text_of(tokenizer, ids, skip_special=False)


@pytest.mark.parametrize("count", [MOST + 1, 3 * MOST])
def test_a_child_answers_with_no_more_than_the_bound(count: int) -> None:
    """However long the text: it says what is wrong instead."""
    tokenizer, desk = tokenizer_of(byte_level()), Desk()
    assert desk.answer(message({"kind": "learn"}, tokenizer.content)) == GOOD
    how = {"kind": "ids", "skip_special": True}
    answer = desk.answer(message(how, ids_of(tokenizer, count).tobytes()))
    assert answer.startswith(LONG + b"their t")
    assert len(answer) < 100
    assert desk.answer(message(how, ids_of(tokenizer, 1).tobytes())) == GOOD + PIECE.encode()


@pytest.mark.asyncio
@pytest.mark.parametrize("count", [MOST + 1, 3 * MOST])
async def test_a_text_that_is_too_long_is_its_requests_error(count: int) -> None:
    """By the field that holds the ids, with the bound."""
    tokenizer, room = tokenizer_of(byte_level()), TokenRoom()
    try:
        with pytest.raises(InvalidRequest) as caught:
            await room.decode(
                tokenizer, ids_of(tokenizer, count), skip_special=True, field="token_ids", kind="x"
            )
    finally:
        await room.close()
    (violation,) = caught.value.violations
    assert violation.field == "token_ids"
    assert violation.description.endswith("at most 16777216")


@pytest.mark.asyncio
async def test_few_ids_of_long_tokens_are_a_childs() -> None:
    """Here is read what is short whatever the ids; shorter still under a decoder that joins tokens
    in its own way, for that may make more of them."""
    room, joining = TokenRoom(command=NEVER), byte_level()
    joining.decoder = decoders.WordPiece()
    for raw, most in (
        (byte_level(), config.PROMPT_CHARS_MAX // len(PIECE)),
        (joining, config.TOKENIZE_SHORT_CHARS_MAX // len(PIECE)),
    ):
        tokenizer = tokenizer_of(raw)
        how: dict[str, Any] = {"skip_special": True, "field": "token_ids", "kind": "x"}
        with pytest.raises(FileNotFoundError):
            await room.decode(tokenizer, ids_of(tokenizer, most + 1), **how)
        text = await room.decode(tokenizer, ids_of(tokenizer, most), **how)
        assert text == tokenizer.decode(ids_of(tokenizer, most).tolist())
    await room.close()


@pytest.mark.asyncio
async def test_a_text_that_is_made_here_is_bounded_as_well() -> None:
    """A decoder may make more of a token than it spells."""
    raw = byte_level()
    raw.decoder = decoders.Replace("x", "y" * config.TOKENIZER_GROWTH_SHORT_MAX)
    tokenizer, room = tokenizer_of(raw), TokenRoom(command=NEVER)
    with pytest.raises(InvalidRequest, match="token_ids: their tokens spell over"):
        await room.decode(
            tokenizer, ids_of(tokenizer, 9), skip_special=True, field="token_ids", kind="x"
        )
    assert tokenizer.decoded == 0
    await room.close()
