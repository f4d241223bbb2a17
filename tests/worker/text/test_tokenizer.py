"""The tokenizer: user text stays text, at most one BOS, EOS by precedence, whole characters."""

from __future__ import annotations

import functools
import json
import lzma
import os
import unicodedata
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as RawTokenizer

from mlxd_shared.config import TOKENIZER_FILE_BYTES_MAX
from mlxd_shared.domain.errors import InvalidModel
from mlxd_worker.text.tokenizer import HELD_TOKENS_MAX, Tokenizer
from mlxd_worker.tokenizing.files import load_tokenizer
from tests.real_inputs import real_input
from tests.support.effort import spread_evenly
from tests.worker.made_tokenizers import (
    BOS_ID,
    EOS_ID,
    byte_fallback,
    byte_level,
    with_bos,
    write_folder,
)

REAL = [
    "gpt-neox-20b",
    "gpt-oss",
    "gpt2",
    "mistral-v3",
    "olmo2-dolma2",
    "phi-3-mini",
    "qwen3",
    "smollm2-135m-instruct",
    "stories260k",
]
MADE: dict[str, Callable[[], RawTokenizer]] = {"level": byte_level, "fallback": byte_fallback}
TEXTS = [
    "Once upon a time, there was a little girl named Lily.",
    "emoji 🙂🏽 family 👨‍👩‍👧‍👦 flag 🇯🇵 end",
    "日本語と中文 mixed with English, 한국어도.",
    "  leading, trailing and   inner   spaces  ",
    "tabs\tand\nnewlines\r\n\n\nthen\n  an indent",
    "العربية עברית ไทย हिन्दी 🜁🜂 cafe\u0301 naïve",
    "def f(x):\n    return {'a': [x**2, 0x1F]}  # 100%",
    "a",
    " ",
    "",
    "zero\u200bwidth \u00a0nbsp \u2028line",
    "🙂" * 20,
]
REPLACEMENT = "\ufffd"


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give the folder that real tokenizers are unpacked into."""
    return tmp_path_factory.mktemp("tokenizers")


@functools.cache
def real_folder(name: str, folder: Path) -> Path:
    """Return the folder of one of the real tokenizers, unpacked once."""
    if name == "stories260k":
        return real_input("models", name)
    source = real_input("tokenizers", name)
    target = folder / name
    target.mkdir()
    (target / "tokenizer.json").write_bytes(
        lzma.decompress((source / "tokenizer.json.xz").read_bytes())
    )
    for file in source.glob("*.json"):
        (target / file.name).write_bytes(file.read_bytes())
    return target


@functools.cache
def real_tokenizer(name: str, folder: Path) -> Tokenizer:
    """Load one of the real tokenizers, once."""
    return load_tokenizer(real_folder(name, folder))


@functools.cache
def made_tokenizer(name: str) -> Tokenizer:
    """Return one of the small tokenizers, once."""
    return Tokenizer(MADE[name](), bos_id=BOS_ID, add_bos=None, eos_ids=(EOS_ID,))


def stream(tokenizer: Tokenizer, ids: list[int], *, skip_special: bool = True) -> list[str]:
    """Return the pieces that a stream of `ids` gives, the tail last."""
    detokenizer = tokenizer.detokenizer(skip_special=skip_special)
    return [*(detokenizer.push(token_id) for token_id in ids), detokenizer.finish()]


def byte_ids(name: str, data: bytes) -> list[int]:
    """Return one token a byte, of the made tokenizer's own byte tokens."""
    vocabulary = MADE[name]().get_vocab()
    if name == "fallback":
        return [vocabulary[f"<0x{byte:02X}>"] for byte in data]
    # The letters that stand for bytes, in the order of bytes, as byte-level BPE defines them.
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    other = [byte for byte in range(256) if byte not in plain]
    letters = {byte: chr(byte) for byte in plain}
    letters |= {byte: chr(256 + index) for index, byte in enumerate(other)}
    return [vocabulary[letters[byte]] for byte in data]


@pytest.mark.parametrize("name", REAL)
def test_streamed_text_of_real_tokenizers_is_the_decoded_text(name: str, unpacked: Path) -> None:
    """A stream's pieces add up to the decoding of all ids, and no piece holds half a character."""
    tokenizer = real_tokenizer(name, unpacked)
    for text in TEXTS:
        ids = tokenizer.encode(text, begin_text=False)
        pieces = stream(tokenizer, ids)
        assert "".join(pieces) == tokenizer.decode(ids)
        assert REPLACEMENT not in "".join(pieces)
        assert len(text) < 60 or max(map(len, pieces)) < len(text)


@pytest.mark.parametrize("name", REAL)
def test_text_survives_encoding_and_decoding(name: str, unpacked: Path) -> None:
    """Text comes back as it went in, but for the leading space and the normal form of a family."""
    tokenizer = real_tokenizer(name, unpacked)
    for text in TEXTS:
        came = tokenizer.decode(tokenizer.encode(text))
        assert came in (text, text.removeprefix(" "), unicodedata.normalize("NFC", text))


@pytest.mark.parametrize("name", REAL)
def test_special_tokens_in_user_text_stay_text(name: str, unpacked: Path) -> None:
    """What a user writes never becomes a special token, and is read as one only where asked."""
    tokenizer = real_tokenizer(name, unpacked)
    written = json.loads((real_folder(name, unpacked) / "tokenizer.json").read_bytes())
    special = {
        added_token["id"]: added_token["content"]
        for added_token in written["added_tokens"]
        if added_token["special"]
    }
    assert special
    for token_id, content in spread_evenly(list(special.items())[:40], 10):
        text = f"say {content} now {content}"
        assert special.keys().isdisjoint(tokenizer.encode(text, begin_text=False))
        assert token_id in tokenizer.encode(text, begin_text=False, parse_special=True)


@pytest.mark.parametrize("name", MADE)
@given(text=st.text(max_size=60))
def test_streamed_text_is_the_decoded_text(name: str, text: str) -> None:
    """Whatever the text, its pieces add up to the decoding of all ids."""
    tokenizer = made_tokenizer(name)
    ids = tokenizer.encode(text.replace(REPLACEMENT, ""), begin_text=False)
    assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids)


@pytest.mark.parametrize("name", MADE)
@given(data=st.binary(max_size=60), cut=st.integers(0, 60))
def test_any_bytes_can_be_streamed(name: str, data: bytes, cut: int) -> None:
    """Bytes that are no UTF-8 break no stream, and cost no character that came before them."""
    tokenizer = made_tokenizer(name)
    good = tokenizer.encode("abc", begin_text=False)
    ids = good + byte_ids(name, data[:cut]) + good + byte_ids(name, data[cut:]) + good
    text = "".join(stream(tokenizer, ids))
    assert text.startswith("abc")
    assert text.rstrip().endswith("abc")
    assert text.count("abc") >= 3
    if name == "level":
        assert text.replace(REPLACEMENT, "") == tokenizer.decode(ids).replace(REPLACEMENT, "")


@pytest.mark.parametrize("name", MADE)
@pytest.mark.parametrize(
    ("steps", "pieces"),
    [
        (["e3 81", "93 e3", "82 93"], ["", "こ", "ん"]),
        (["f0", "9f", "99", "82"], ["", "", "", "🙂"]),
    ],
)
def test_a_character_is_given_when_its_last_byte_is_there(
    name: str, steps: list[str], pieces: list[str]
) -> None:
    """Bytes are held until they are a character, and a character is not held for the next one."""
    detokenizer = made_tokenizer(name).detokenizer()
    for step, piece in zip(steps, pieces, strict=True):
        got = [detokenizer.push(token_id) for token_id in byte_ids(name, bytes.fromhex(step))]
        assert "".join(got) == piece
    assert detokenizer.finish() == ""


@pytest.mark.parametrize("name", MADE)
def test_an_unfinished_character_is_flushed_at_the_end(name: str) -> None:
    """A tail that never became a character is given out as U+FFFD, once, at the end."""
    tokenizer = made_tokenizer(name)
    detokenizer = tokenizer.detokenizer()
    ids = tokenizer.encode("abc", begin_text=False) + byte_ids(name, b"\xe3\x81")
    assert "".join(detokenizer.push(token_id) for token_id in ids) == "abc"
    tail = detokenizer.finish()
    assert tail
    assert set(tail) == {REPLACEMENT}
    assert detokenizer.finish() == ""


@pytest.mark.parametrize("name", MADE)
def test_a_run_that_is_no_text_is_not_held_for_ever(name: str) -> None:
    """No more than HELD_TOKENS_MAX tokens are ever held back."""
    detokenizer = made_tokenizer(name).detokenizer()
    pieces = [detokenizer.push(token_id) for token_id in byte_ids(name, b"\xff" * 200)]
    silent = max(len(run) for run in "".join("x" if p else "." for p in pieces).split("x"))
    assert silent <= HELD_TOKENS_MAX
    assert "".join(pieces) + detokenizer.finish() == REPLACEMENT * 200


def test_a_character_given_out_is_not_taken_back() -> None:
    """Byte fallback judges a run of bytes as a whole, but what was sent of it stays sent."""
    tokenizer = made_tokenizer("fallback")
    ids = byte_ids("fallback", "こ".encode() + b"\xff") + tokenizer.encode("abc", begin_text=False)
    assert "".join(stream(tokenizer, ids)) == f"こ{REPLACEMENT} abc"


@pytest.mark.parametrize("name", MADE)
def test_special_tokens_are_shown_only_where_asked(name: str) -> None:
    """Special tokens have no text by default, and are passed over without a trace of a space."""
    tokenizer = made_tokenizer(name)
    word = tokenizer.encode("abc", begin_text=False)
    ids = [*word, BOS_ID, *word]
    assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids)
    shown = stream(tokenizer, ids, skip_special=False)
    assert "<s>" in "".join(shown)
    assert "".join(shown) == tokenizer.decode(ids, skip_special=False)


@pytest.mark.parametrize("name", MADE)
def test_an_id_the_tokenizer_lacks_has_no_text(name: str) -> None:
    """A model's padding rows have ids beyond the tokenizer's: no text and no fault."""
    tokenizer = made_tokenizer(name)
    word = tokenizer.encode("abc", begin_text=False)
    pieces = stream(tokenizer, [*word, tokenizer.vocab_size + 5, *word])
    assert "".join(pieces).replace(" ", "") == "abcabc"
    assert tokenizer.token_text(tokenizer.vocab_size + 5) is None


@pytest.mark.parametrize("post", [False, True])
@pytest.mark.parametrize(("add_bos", "expected"), [(True, [BOS_ID]), (False, []), (None, None)])
def test_bos_is_added_as_the_files_say(
    tmp_path: Path, *, post: bool, add_bos: bool | None, expected: list[int] | None
) -> None:
    """add_bos_token decides; where it is absent the post-processor does; never two."""
    raw = with_bos(byte_level()) if post else byte_level()
    config: dict[str, Any] = {"bos_token": "<s>"}
    if add_bos is not None:
        config["add_bos_token"] = add_bos
    tokenizer = load_tokenizer(write_folder(tmp_path / "model", raw, tokenizer_config=config))
    begin = ([BOS_ID] if post else []) if expected is None else expected
    plain = tokenizer.encode("the fox", begin_text=False)
    assert BOS_ID not in plain
    assert tokenizer.encode("the fox") == begin + plain
    assert tokenizer.encode("") == begin
    # A template writes its own BOS: that one stays, and no second one joins it.
    assert tokenizer.encode("<s>the fox", parse_special=True) == [BOS_ID, *plain]


EOS_FILES: list[tuple[dict[str, Any], tuple[int, ...]]] = [
    ({"generation_config": {"eos_token_id": [2, 0]}, "config": {"eos_token_id": 1}}, (2, 0)),
    ({"generation_config": {"eos_token_id": [2, 2]}}, (2,)),
    ({"generation_config": {}, "config": {"eos_token_id": 1}}, (1,)),
    ({"config": {"eos_token_id": None}, "tokenizer_config": {"eos_token": "</s>"}}, (2,)),
    ({"tokenizer_config": {"eos_token": {"content": "<s>"}}}, (1,)),
    ({"special_tokens_map": {"eos_token": {"content": "</s>"}}}, (2,)),
    ({"tokenizer_config": {"eos_token": ["<s>", "</s>"]}}, (1, 2)),
    ({}, ()),
]


@pytest.mark.parametrize(("files", "expected"), EOS_FILES)
def test_eos_ids_come_from_the_first_file_that_has_any(
    tmp_path: Path, files: dict[str, Any], expected: tuple[int, ...]
) -> None:
    """The order is generation_config, config, tokenizer_config, special_tokens_map."""
    tokenizer = load_tokenizer(write_folder(tmp_path / "model", byte_level(), **files))
    assert tokenizer.eos_ids == expected


BAD_FILES: list[tuple[str, str, str, str]] = [
    ("tokenizer.json", "", "tokenizer.json", ""),
    ("tokenizer.json", '{"version": "1.0"', "tokenizer.json", ""),
    ("tokenizer.json", '{"version": "1.0", "model": {"type": "None"}}', "tokenizer.json", ""),
    ("tokenizer_config.json", "{", "tokenizer_config.json", ""),
    ("tokenizer_config.json", "[" * 100_000, "tokenizer_config.json", ""),
    ("tokenizer_config.json", "[]", "tokenizer_config.json", ""),
    (
        "tokenizer_config.json",
        '{"add_bos_token": "yes"}',
        "tokenizer_config.json",
        "add_bos_token",
    ),
    ("tokenizer_config.json", '{"add_bos_token": true}', "tokenizer_config.json", "add_bos_token"),
    ("tokenizer_config.json", '{"eos_token": "<gone>"}', "tokenizer_config.json", "eos_token"),
    ("generation_config.json", '{"eos_token_id": 1.5}', "generation_config.json", "eos_token_id"),
    ("generation_config.json", '{"eos_token_id": true}', "generation_config.json", "eos_token_id"),
    ("config.json", '{"eos_token_id": [-1]}', "config.json", "eos_token_id"),
    ("config.json", '{"bos_token_id": {}}', "config.json", "bos_token_id"),
]


@pytest.mark.parametrize(("name", "text", "file", "field"), BAD_FILES)
def test_a_damaged_file_is_named(
    tmp_path: Path, name: str, text: str, file: str, field: str
) -> None:
    """A damaged or contradictory file is a typed error with the file and the field."""
    folder = write_folder(tmp_path / "model", byte_level())
    (folder / name).write_text(text, encoding="utf-8")
    with pytest.raises(InvalidModel) as caught:
        load_tokenizer(folder)
    assert (caught.value.file, caught.value.field) == (file, field)


def test_a_missing_tokenizer_is_named(tmp_path: Path) -> None:
    """A folder without tokenizer.json is a typed error that names the file."""
    with pytest.raises(InvalidModel, match="missing") as caught:
        load_tokenizer(tmp_path)
    assert caught.value.file == "tokenizer.json"


def test_a_file_that_is_no_text_is_named(tmp_path: Path) -> None:
    """Bytes that are no UTF-8, and a folder in place of a file, are typed errors too."""
    folder = write_folder(tmp_path / "model", byte_level())
    (folder / "config.json").write_bytes(b"\xff\xfe{}")
    with pytest.raises(InvalidModel, match=r"config\.json"):
        load_tokenizer(folder)
    (folder / "config.json").unlink()
    (folder / "config.json").mkdir()
    with pytest.raises(InvalidModel, match=r"config\.json"):
        load_tokenizer(folder)


def test_an_oversized_file_is_refused_unread(tmp_path: Path) -> None:
    """A file above its bound is refused before it is read."""
    folder = write_folder(tmp_path / "model", byte_level())
    os.truncate(folder / "tokenizer.json", TOKENIZER_FILE_BYTES_MAX + 1)
    with pytest.raises(InvalidModel, match=str(TOKENIZER_FILE_BYTES_MAX)):
        load_tokenizer(folder)


def test_limits_left_in_the_file_cut_no_prompt(tmp_path: Path) -> None:
    """Truncation and padding saved by a training run are not applied to prompts."""
    raw = byte_level()
    raw.enable_truncation(4)
    raw.enable_padding(length=8)
    tokenizer = load_tokenizer(write_folder(tmp_path / "model", raw))
    assert tokenizer.decode(tokenizer.encode("once upon a time there was")).startswith(
        "once upon a time there was"
    )
    assert len(tokenizer.encode("fox")) < 8


def test_encoding_is_the_same_from_many_threads() -> None:
    """Both ways of reading special tokens can be in use at once, from several threads."""
    tokenizer = made_tokenizer("level")
    text = "<s>once upon a time</s> " * 20
    expected = {
        parse: tokenizer.encode(text, begin_text=False, parse_special=parse)
        for parse in (False, True)
    }
    assert expected[True] != expected[False]
    with ThreadPoolExecutor(4) as pool:
        jobs = {
            (index, parse): pool.submit(
                tokenizer.encode, text, begin_text=False, parse_special=parse
            )
            for index in range(20)
            for parse in (False, True)
        }
    assert all(job.result() == expected[parse] for (_, parse), job in jobs.items())


def test_the_real_model_is_read_as_its_files_say() -> None:
    """stories260k: BOS by its config, both EOS ids, and the reference's prompt ids."""
    tokenizer = load_tokenizer(real_input("models", "stories260k"))
    golden = json.loads(real_input("models", "golden_greedy.json").read_text(encoding="utf-8"))
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.vocab_size) == (1, (1, 2), 512)
    for case in golden["stories260k"]:
        assert tokenizer.encode(case["prompt"]) == case["prompt_ids"]
