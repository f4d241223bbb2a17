"""The bytes of single tokens: what they spell, be it half a character."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders

from mlxd_worker.text.spelling import UnknownDecoder, spelling
from mlxd_worker.text.tokenizer import Tokenizer
from mlxd_worker.tokenizing.files import load_tokenizer
from tests.support.effort import spread_evenly
from tests.worker.made_tokenizers import EOS_ID, byte_fallback, byte_level
from tests.worker.text.test_tokenizer import REAL, TEXTS, real_folder

MADE: dict[str, Callable[[], RawTokenizer]] = {"level": byte_level, "fallback": byte_fallback}


def own(raw: RawTokenizer) -> Tokenizer:
    """Return ours around the library's."""
    return Tokenizer(raw, bos_id=None, add_bos=False, eos_ids=(EOS_ID,))


def spell_text(tokenizer: Tokenizer, text: str) -> bytes:
    """Return the bytes of all tokens of `text`, one after the other."""
    ids = tokenizer.encode(text, begin_text=False)
    return b"".join(map(tokenizer.token_bytes, ids))


def variants(text: str) -> tuple[bytes, bytes]:
    """Return the bytes of a text, without and with the space that some tokenizers put first."""
    return text.encode(), b" " + text.encode()


@pytest.mark.parametrize("name", MADE)
@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_the_bytes_of_its_tokens_are_the_text(name: str, text: str) -> None:
    """Whatever a text is split into, also inside a character; a space may come before all of it."""
    assert spell_text(own(MADE[name]()), text) in variants(text)


@pytest.mark.parametrize("name", spread_evenly(REAL, 4))
def test_the_bytes_of_real_tokens_are_the_text(
    name: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """As above, with the tokenizers of models in use; one that normalises is given plain text."""
    tokenizer = load_tokenizer(real_folder(name, tmp_path_factory.mktemp("tokenizers")))
    for text in TEXTS:
        round_trip = tokenizer.decode(tokenizer.encode(text, begin_text=False))
        if round_trip == text:
            assert spell_text(tokenizer, text) in variants(text)


def test_a_token_may_be_a_part_of_a_character() -> None:
    """Three bytes of a character that the vocabulary does not have are three tokens."""
    tokenizer = own(byte_fallback())
    ids = tokenizer.encode("語", begin_text=False)[-3:]
    assert [tokenizer.token_bytes(token_id) for token_id in ids] == [b"\xe8", b"\xaa", b"\x9e"]


def test_special_tokens_are_their_spelling() -> None:
    """Though a text leaves them out; what the tokenizer does not have is nothing."""
    for make in MADE.values():
        tokenizer = own(make())
        assert tokenizer.token_bytes(EOS_ID) == b"</s>"
        assert tokenizer.token_bytes(tokenizer.vocab_size + 5) == b""


def test_a_decoder_of_words_is_asked_token_by_token() -> None:
    """Where tokens have no bytes of their own, what the library makes of one is told."""
    raw = byte_level()
    raw.decoder = decoders.WordPiece()
    with pytest.raises(UnknownDecoder, match="WordPiece"):
        spelling({"type": "WordPiece"})
    with pytest.raises(UnknownDecoder, match="no decoder"):
        spelling(None)
    tokenizer = own(raw)
    (token_id,) = tokenizer.encode("a", begin_text=False)
    assert tokenizer.token_bytes(token_id) == b"a"


def test_a_folder_tells_how_its_tokens_are_spelled(tmp_path: Path) -> None:
    """The decoder is read from tokenizer.json, as everything else."""
    byte_fallback().save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    assert spell_text(tokenizer, "ab 語") == " ab 語".encode()
