"""Which tokenizers are plain, tried or refused, by what their files say."""

from __future__ import annotations

import json
import lzma
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import models

from mlxd_shared.domain.errors import InvalidModel
from mlxd_worker.text.rules import check_tokenizer, read_settings
from mlxd_worker.tokenizing.children import try_tokenizer
from mlxd_worker.tokenizing.files import load_tokenizer
from tests.real_inputs import real_input
from tests.support.trained import DEMO
from tests.worker.made_tokenizers import byte_fallback, byte_level

THOUSAND = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 1000}
SLOW = {"type": "Split", "pattern": {"Regex": "a*b"}, "behavior": "Isolated", "invert": False}
NAMES = (
    "gpt-neox-20b", "gpt-oss", "gpt2", "mistral-v3", "olmo2-dolma2", "phi-3-mini", "qwen3",
    "smollm2-135m-instruct",
)  # fmt: skip


def settings(**parts: Any) -> dict[str, Any]:
    """Return a tokenizer.json with these parts of its own."""
    settings_made: dict[str, Any] = json.loads(RawTokenizer(models.BPE({"a": 0}, [])).to_str())
    return settings_made | parts


def sequence(part: str, *steps: Any) -> dict[str, Any]:
    lists = {
        "normalizer": "normalizers", "pre_tokenizer": "pretokenizers", "decoder": "decoders"
    }  # fmt: skip
    return {part: {"type": "Sequence", lists[part]: list(steps)}}


@pytest.mark.parametrize("name", NAMES)
def test_tokenizers_in_wide_use_are_plain(name: str) -> None:
    """They are read as ever: no trial, and short texts on the spot."""
    content = lzma.decompress(real_input("tokenizers", name, "tokenizer.json.xz").read_bytes())
    judged = check_tokenizer(read_settings(content))
    assert (judged.is_plain, judged.is_modest) == (True, True)


def test_our_own_are_plain() -> None:
    """The demo's, and those of the tests of either family."""
    for raw in (byte_level(), byte_fallback()):
        assert check_tokenizer(read_settings(raw.to_str().encode())).is_modest
    assert check_tokenizer(read_settings((DEMO / "tokenizer.json").read_bytes())).is_modest


@pytest.mark.parametrize(
    ("parts", "field", "problem"),
    [
        (sequence("normalizer", THOUSAND, THOUSAND), "normalizer", "over 256 times as long"),
        (sequence("decoder", THOUSAND), "decoder", "over 256 times as long"),
        ({"normalizer": {"type": "Prepend", "prepend": "x" * 999}}, "normalizer", "over 256 times"),
        (sequence("pre_tokenizer", *[{"type": "ByteLevel"}] * 9), "pre_tokenizer", "over 256"),
        (sequence("normalizer", *[{"type": "NFC"}] * 65), "normalizer", "65 steps; at most 64"),
        ({"normalizer": {"prepend": "x"}}, "normalizer", "a step without a type"),
        (
            {"normalizer": {"type": "Replace", "pattern": {"String": ""}, "content": "b"}},
            "normalizer", "replaces an empty text",
        ),
        (
            {"decoder": {"type": "Replace", "pattern": {"Regex": "a*b"}, "content": ""}},
            "decoder", "an expression in a decoder is not served",
        ),
        (
            {"post_processor": {"type": "TemplateProcessing", "single": [{"Sequence": {}}] * 9}},
            "post_processor.single", "holds the text 9 times",
        ),
        (
            {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "%"}},
            "normalizer.precompiled_charsmap", "no table",
        ),
    ],
)  # fmt: skip
def test_what_makes_too_much_of_a_text_is_refused_by_name(
    parts: dict[str, Any], field: str, problem: str
) -> None:
    """Before the library sees it: reading the file alone would run some of it."""
    with pytest.raises(InvalidModel, match=problem) as caught:
        check_tokenizer(settings(**parts))
    assert (caught.value.file, caught.value.field) == ("tokenizer.json", field)


@pytest.mark.parametrize(
    "parts",
    [
        {"pre_tokenizer": SLOW},
        {"normalizer": {**THOUSAND, "content": "a" * 100}},
        {"model": {"type": "WordPiece", "vocab": {}, "max_input_chars_per_word": 1 << 30}},
        {"model": {"type": "BPE", "vocab": {}, "merges": [], "dropout": 0.5}},
    ],
)
def test_what_nobody_can_judge_is_not_plain(parts: dict[str, Any]) -> None:
    """It is served by a process that can be killed."""
    assert not check_tokenizer(settings(**parts)).is_plain


@pytest.mark.parametrize(
    ("parts", "modest"),
    [
        (sequence("normalizer", {"type": "Prepend", "prepend": "xxxx"}, {"type": "NFC"}), True),
        ({"normalizer": {"type": "NFKC"}}, False),
        ({"model": {"type": "BPE", "vocab": {"a" * 512: 0}, "merges": []}}, True),
        ({"model": {"type": "BPE", "vocab": {"a" * 513: 0}, "merges": []}}, False),
        ({"model": {"type": "Unigram", "vocab": [["a" * 513, 0.5]]}}, False),
        ({"added_tokens": [{"content": "a" * 513}]}, False),
    ],
)
def test_a_plain_one_is_modest_where_its_memory_is_known(
    parts: dict[str, Any], *, modest: bool
) -> None:
    """What makes much of a text, or looks at it far ahead, is short or a child's."""
    judged = check_tokenizer(settings(**parts))
    assert (judged.is_plain, judged.is_modest) == (True, modest)


@pytest.mark.parametrize(
    "content",
    [b"[]", b"{", b'{"a": "\xff"}', b"[" * 100_000, b'{"normalizer": null, "normalizer": null}'],
)
def test_a_file_that_says_nothing_clear_is_refused(content: bytes) -> None:
    """What stands there twice, the library might read otherwise than we do."""
    with pytest.raises(InvalidModel, match="is not a tokenizer") as caught:
        read_settings(content)
    assert caught.value.file == "tokenizer.json"


def test_a_hostile_file_ends_as_an_error_of_its_load(tmp_path: Path) -> None:
    """Two thousandfold replacements kept a worker busy for ever, from its first added token on."""
    token = {
        "id": 1, "content": "a" * 4000, "single_word": False, "lstrip": False, "rstrip": False,
        "normalized": True, "special": False,
    }  # fmt: skip
    hostile = settings(**sequence("normalizer", THOUSAND, THOUSAND), added_tokens=[token])
    (tmp_path / "tokenizer.json").write_text(json.dumps(hostile), encoding="utf-8")
    with pytest.raises(InvalidModel, match="over 256 times as long") as caught:
        load_tokenizer(tmp_path)
    assert caught.value.file == "tokenizer.json"


def test_a_file_that_takes_too_long_to_read_ends_with_its_trial() -> None:
    """It is read where it can be killed first; the limit is the operator's to trust.

    Each token takes steps by the cube of its length, tens of seconds; all of them take hours.
    """
    token = {
        "single_word": False, "lstrip": False, "rstrip": False, "normalized": True,
        "special": False,
    }  # fmt: skip
    step = {"type": "Replace", "pattern": {"Regex": "a*a*b$"}, "content": "c"}
    tokens = [{**token, "id": i, "content": "a" * (4000 - i) + "bc"} for i in range(1, 499)]
    slow = settings(normalizer=step, added_tokens=tokens)
    with pytest.raises(InvalidModel, match="takes longer than 1 s") as caught:
        try_tokenizer(json.dumps(slow).encode(), limit_s=1.0)
    assert caught.value.file == "tokenizer.json"


def test_a_tokenizer_that_is_not_plain_is_loaded_after_its_trial(tmp_path: Path) -> None:
    """It reads texts like any other."""
    (tmp_path / "tokenizer.json").write_text(
        json.dumps(settings(pre_tokenizer=SLOW)), encoding="utf-8"
    )
    tokenizer = load_tokenizer(tmp_path)
    assert not tokenizer.is_plain
    assert tokenizer.encode("aaa") == [0, 0, 0]
