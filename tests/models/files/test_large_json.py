"""Large objects of JSON, read member by member: as Python reads them, within bounds."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from mlxd_models.files.large_json import PIECE_CHARS_MAX, SMALL_NBYTES, parse_large_object
from mlxd_shared import config
from mlxd_shared.domain.errors import InvalidModel

ENTRY = {"dtype": "U8", "shape": [2, 3], "data_offsets": [0, 6]}


def large(**more: Any) -> dict[str, Any]:
    """Return an object that is read member by member."""
    return {f"m.{i}\u00e9\\": ENTRY for i in range(SMALL_NBYTES // 40)} | more


@pytest.mark.parametrize(
    "dump",
    [
        json.dumps,
        lambda value: json.dumps(value, indent=3, ensure_ascii=False),
        lambda value: json.dumps(value, separators=(",", ":")),
        lambda value: " " * 200_000 + json.dumps(value) + "\n" * 200_000,
        lambda value: "\ufeff" + json.dumps(value),
    ],
)
def test_it_is_what_python_reads(dump: Callable[[Any], str]) -> None:
    """However it is spaced; long values and nested objects too, and numbers at a piece's end."""
    value = large(
        text="x" * 100_000,
        whole=10**4090,
        nested={str(i): {"a": [i, None, True, 1.5e3]} for i in range(5000)},
        deep=json.loads("[" * 90 + "]" * 90),
        empty={},
    )
    raw = dump(value).encode()
    assert len(raw) > SMALL_NBYTES
    assert parse_large_object(raw, file="f") == value


@pytest.mark.parametrize(
    ("cut", "words"),
    [
        (lambda text: text[:-1], "was expected at"),
        (lambda text: text[:-1] + ",}", "a name was expected"),
        (lambda text: text + "x", "the end was expected"),
        (lambda text: text.replace(":", " ", 1), "':' was expected"),
        (lambda text: text[:-1] + "; }", "',' was expected"),
        (lambda text: text[:-1] + ", 5: 1}", "a name was expected"),
        (lambda text: text[:-1] + ', "a": nope}', "was expected"),
        (lambda text: "[" + text + "]", "not a JSON object"),
        (lambda text: text[:-1] + ', "a": "\\ud800"}', "surrogates"),
        (lambda text: text[:-1] + ', "a": ' + "9" * 5000 + "}", "integer string"),
        (lambda text: text[:-1] + ', "a": ' + "[" * 5000 + "}", "not JSON"),
    ],
)
def test_what_is_no_json_is_refused(cut: Callable[[str], str], words: str) -> None:
    """By the file's name and what is wrong."""
    with pytest.raises(InvalidModel) as caught:
        parse_large_object(cut(json.dumps(large())).encode(), file="f")
    assert caught.value.file == "f"
    assert words in caught.value.problem


def test_bytes_that_are_no_text_are_refused() -> None:
    """As everywhere else."""
    with pytest.raises(InvalidModel, match="not JSON"):
        parse_large_object(b"{" + b"\xff" * SMALL_NBYTES + b"}", file="f")


def test_members_and_values_have_a_bound() -> None:
    """Each with its limit, before all of the text is read."""
    many = {str(i): 0 for i in range(config.JSON_MEMBERS_MAX + 1)}
    for value, words in (
        (many, f"over {config.JSON_MEMBERS_MAX} members"),
        ({"in": many}, f"over {config.JSON_MEMBERS_MAX} members"),
        ({"a": "x" * (PIECE_CHARS_MAX + 1), "b": 0}, f"over {PIECE_CHARS_MAX} characters"),
    ):
        with pytest.raises(InvalidModel, match=words):
            parse_large_object(json.dumps(value).encode(), file="f")


def test_a_name_that_comes_again_counts_again() -> None:
    """To read it takes as long."""
    text = b"{%b}" % (b'"a":0,' * (config.JSON_MEMBERS_MAX + 1))
    with pytest.raises(InvalidModel, match=f"over {config.JSON_MEMBERS_MAX} members"):
        parse_large_object(text, file="f")


def test_small_ones_are_read_at_once() -> None:
    """By the reader of all small files."""
    assert parse_large_object(b'{"a": 1}', file="f") == {"a": 1}
    with pytest.raises(InvalidModel, match="not a JSON object"):
        parse_large_object(b"[]", file="f")
