"""Where whitespace before a word belongs, characters spread over tokens, and whose BOS counts.

A pre-tokenizer cuts a text with a pattern that looks ahead; an engine without look-ahead has to
move a boundary back by hand. The cases are those in which such a hand-made rule goes wrong.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as RawTokenizer

from mlxd_worker.text.tokenizer import Tokenizer
from mlxd_worker.tokenizing.files import load_tokenizer
from tests.worker.made_tokenizers import byte_level, write_folder

LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
NUMBERS = r"\p{N}{1,3}"
SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
PLAIN_PUNCTUATION = r"[^\s\p{L}\p{N}]+[\r\n]*"
SPACED_PUNCTUATION = rf" ?{PLAIN_PUNCTUATION}"
PIECES = ["word", " word", "\tword", "}", " }", "1", " 1", " ", "  ", "\t", " \n"]


def spell_bytes(data: bytes) -> str:
    """Return bytes in the letters that stand for them in a byte-level vocabulary."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    other = [byte for byte in range(256) if byte not in plain]
    letters = {byte: chr(byte) for byte in plain}
    letters |= {byte: chr(256 + index) for index, byte in enumerate(other)}
    return "".join(letters[byte] for byte in data)


def tokenizer_of(folder: Path, *pieces: bytes, punctuation: str = SPACED_PUNCTUATION) -> Tokenizer:
    """Return a tokenizer that has a token for each of `pieces` and for each byte.

    Like Llama 3's it takes a piece that the vocabulary has as it is: each token is one piece.
    """
    names = [spell_bytes(piece) for piece in pieces]
    names += [letter for letter in pre_tokenizers.ByteLevel.alphabet() if letter not in names]
    raw = RawTokenizer(models.BPE({n: i for i, n in enumerate(names)}, [], ignore_merges=True))
    pattern = Regex("|".join((LETTERS, NUMBERS, punctuation, SPACES)))
    raw.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(pattern, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    raw.decoder = decoders.ByteLevel()
    return load_tokenizer(write_folder(folder / "tokenizer", raw))


@pytest.mark.parametrize(
    ("text", "punctuation", "begins_at"),
    [
        ("  word", PLAIN_PUNCTUATION, 1),
        ("  }", PLAIN_PUNCTUATION, 2),
        ("  }", SPACED_PUNCTUATION, 1),
        ("\tword", PLAIN_PUNCTUATION, 0),
        ("  1", PLAIN_PUNCTUATION, 2),
        (" \nword", PLAIN_PUNCTUATION, 2),
    ],
)
def test_where_the_whitespace_before_a_word_ends(
    text: str, punctuation: str, begins_at: int, tmp_path: Path
) -> None:
    """The last piece begins where the pattern has it: it takes the space that belongs to it."""
    pieces = [piece.encode() for piece in PIECES]
    tokenizer = tokenizer_of(tmp_path, *pieces, punctuation=punctuation)

    ids = tokenizer.encode(text, begin_text=False)

    assert tokenizer.decode(ids[-1:]) == text[begins_at:]
    assert tokenizer.decode(ids) == text


def test_tokens_that_cut_through_characters(tmp_path: Path) -> None:
    """E3 81 gives nothing, 93 E3 the first character, 82 93 the second: what is cut is held."""
    tokenizer = tokenizer_of(tmp_path, b"\xe3\x81", b"\x93\xe3", b"\x82\x93")
    detokenizer = tokenizer.detokenizer()

    assert [detokenizer.push(token_id) for token_id in (0, 1, 2)] == ["", "こ", "ん"]
    assert detokenizer.finish() == ""
    assert "こん".encode() == b"\xe3\x81\x93\xe3\x82\x93"


@pytest.mark.parametrize("length", [3, 30, 200])
def test_a_text_that_never_comes_level_with_its_tokens(length: int, tmp_path: Path) -> None:
    """However long every token ends in the middle of a character, no character is lost or late."""
    pieces = (b"\xe3\x81", b"\x93\xe3", b"\x81\x93\xe3", b"\x81\x93")
    detokenizer = tokenizer_of(tmp_path, *pieces).detokenizer()

    got = [detokenizer.push(token_id) for token_id in (0, 1, *([2] * length), 3)]

    assert got == ["", *("こ" * (length + 2))]
    assert detokenizer.finish() == ""


BOS_FILES: list[tuple[dict[str, Any], int | None]] = [
    ({"tokenizer_config": {"bos_token": "<s>"}, "special_tokens_map": {"bos_token": "</s>"}}, 1),
    ({"special_tokens_map": {"bos_token": "<s>"}, "config": {"bos_token_id": 2}}, 1),
    ({"config": {"bos_token_id": 1}, "generation_config": {"bos_token_id": 2}}, 1),
    ({"tokenizer_config": {"bos_token": None}, "generation_config": {"bos_token_id": 2}}, 2),
    ({}, None),
]


@pytest.mark.parametrize(("files", "expected"), BOS_FILES)
def test_bos_comes_from_the_first_file_that_has_one(
    tmp_path: Path, files: dict[str, Any], expected: int | None
) -> None:
    """The order is tokenizer_config, special_tokens_map, config, generation_config: what was saved
    with the tokenizer before what was saved with the weights."""
    tokenizer = load_tokenizer(write_folder(tmp_path / "model", byte_level(), **files))
    assert tokenizer.bos_id == expected
