"""The bytes of each token are those that its text gets."""

from __future__ import annotations

import lzma
import random

import pytest
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as RawTokenizer

from mlxd_shared.domain.errors import InvalidRequest
from mlxd_shared.domain.formats import FormatKind, ResponseFormat
from mlxd_worker.constraints.compiler import Constraints
from mlxd_worker.constraints.vocabulary import token_bytes
from mlxd_worker.text.tokenizer import Tokenizer
from tests.real_inputs import REAL_INPUTS, real_input
from tests.support.constrained import demo_tokenizer
from tests.support.effort import spread_evenly

NAMES = (
    "gpt-neox-20b", "gpt-oss", "gpt2", "mistral-v3", "olmo2-dolma2", "phi-3-mini", "qwen3",
    "smollm2-135m-instruct",
)  # fmt: skip
YES = ResponseFormat(FormatKind.CHOICE, choices=(" yes", "no"))


def make_tokenizer(
    spellings: list[str], *, special: int, decoder: decoders.Decoder | None
) -> Tokenizer:
    """Return a tokenizer of these spellings, of which one is special and ends the text."""
    raw = RawTokenizer(models.WordLevel({text: i for i, text in enumerate(spellings)}, "?"))
    raw.add_special_tokens([AddedToken(spellings[special], special=True)])
    if decoder is not None:
        raw.decoder = decoder
    return Tokenizer(raw, bos_id=None, add_bos=None, eos_ids=(special,))


def sentencepiece() -> Tokenizer:
    """Return a tokenizer with a mark for blanks, tokens for bytes, and a strip at the begin."""
    spellings = ["</s>", "▁yes", "no", "<0x6E>", "<0x6F>", "▁", "y", "es", "?", "<0xC3>", "<0xA9>"]
    steps = [
        decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ]  # fmt: skip
    return make_tokenizer(spellings, special=0, decoder=decoders.Sequence(steps))


def spell_output(tokenizer: Tokenizer, ids: list[int]) -> str:
    """Return the text of a stream under a constraint."""
    decoder = tokenizer.detokenizer(anchored=True)
    return "".join(decoder.push(i) for i in ids) + decoder.finish()


def check(tokenizer: Tokenizer, *, tries: int) -> None:
    """Compare the bytes of random tokens with their text."""
    pieces = tokenizer.pieces()
    rng, ids = random.Random(1), sorted(pieces)
    for _ in range(tries):
        some = rng.choices(ids, k=rng.randint(1, 12))
        expected = b"".join(pieces[i] for i in some).decode("utf-8", "replace")
        if "\ufffd" not in expected:  # some decoders let one bad byte spoil good ones before it
            assert spell_output(tokenizer, some) == expected, some


def test_bytes_are_the_text_of_the_demo_model() -> None:
    """Byte-level: any ids, one after the other, give their bytes."""
    check(demo_tokenizer(), tries=100)


def test_bytes_are_the_text_where_blanks_are_marked() -> None:
    """Marked blanks, bytes as tokens, and no blank lost where the text begins."""
    check(sentencepiece(), tries=100)

    assert spell_output(sentencepiece(), [1]) == " yes"


@pytest.mark.parametrize("name", spread_evenly(NAMES, 4))
def test_bytes_are_the_text_of_real_tokenizers(name: str) -> None:
    """The vocabularies of eight model families."""
    raw = lzma.decompress(real_input("tokenizers", name, "tokenizer.json.xz").read_bytes())
    check(Tokenizer(RawTokenizer.from_buffer(raw), bos_id=None, add_bos=None, eos_ids=()), tries=40)


def test_every_real_tokenizer_is_on_the_list() -> None:
    """A tokenizer that comes to the real inputs is tried, too."""
    folder = real_input("tokenizers")

    assert REAL_INPUTS in folder.parents
    assert {path.name for path in folder.iterdir()} == set(NAMES)


def test_special_tokens_and_padding_have_no_bytes() -> None:
    """Neither what ends the text, nor ids that only the model has; a smaller model has fewer."""
    tokenizer = sentencepiece()
    wide, narrow = token_bytes(tokenizer, 40), token_bytes(tokenizer, 5)

    assert (wide.pieces[0], wide.pieces[20:]) == (b"", (b"",) * 20)
    assert wide.pieces[9:11] == (b"\xc3", b"\xa9")
    assert (len(narrow.pieces), narrow.eos_ids) == (5, (0,))


def _allowed_ids(mask: bytes) -> set[int]:
    return {i for i in range(len(mask) * 8) if mask[i >> 3] >> (i & 7) & 1}


def test_all_spellings_of_a_byte_are_allowed_and_nothing_else() -> None:
    """Masks have the model's size; two tokens of the same bytes are both good; padding is not."""
    matcher = Constraints(sentencepiece(), 64).compile(YES).start()

    assert len(matcher.mask()) == 8
    assert _allowed_ids(matcher.mask()) == {1, 2, 3, 5}
    matcher.accept(3)
    assert _allowed_ids(matcher.mask()) == {4}
    matcher.accept(4)
    assert (matcher.native.is_accepting(), matcher.is_over) == (True, True)
    assert _allowed_ids(matcher.mask()) == {0}


@pytest.mark.parametrize("vocab_size", [32, 33, 64])
def test_a_model_without_an_end_needs_none(vocab_size: int) -> None:
    """Where no id ends a text, a complete output has nothing to go on with."""
    tokenizer = sentencepiece()
    endless = Tokenizer(tokenizer._raw, bos_id=None, add_bos=None, eos_ids=())
    matcher = Constraints(endless, vocab_size).compile(YES).start()
    for token_id in (3, 4):
        assert len(matcher.mask()) == -(-vocab_size // 32) * 4
        matcher.accept(token_id)

    assert matcher.is_over
    assert not {i for i in _allowed_ids(matcher.mask()) if i < vocab_size}


def test_a_decoder_that_joins_tokens_its_own_way_is_refused() -> None:
    """Where a token has no bytes of its own, no format is served, and the reason is told."""
    for decoder in (None, decoders.WordPiece()):
        constraints = Constraints(make_tokenizer(["a", "b", "</s>"], special=2, decoder=decoder), 3)
        with pytest.raises(InvalidRequest, match="not with this model"):
            constraints.compile(YES)
