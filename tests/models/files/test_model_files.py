"""A model's small files: what is read, what is refused, and that no reader ever waits."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mlxd_models.files.model_files import parse_json_object, read_file
from mlxd_shared.domain.errors import InvalidModel


def test_a_file_is_read_up_to_its_bound(tmp_path: Path) -> None:
    """All of it, or an error that says the bound; a file that is not there is None."""
    (tmp_path / "f").write_bytes(b"12345")
    assert read_file(tmp_path / "f", bytes_max=5) == b"12345"
    with pytest.raises(InvalidModel, match="over 4 bytes long"):
        read_file(tmp_path / "f", bytes_max=4)
    assert read_file(tmp_path / "none", bytes_max=4) is None


def test_only_regular_files_are_read(tmp_path: Path) -> None:
    """A folder is refused, and so is a pipe, without waiting for who would write into it."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for name in ("pipe", "folder"):
        with pytest.raises(InvalidModel, match="not a regular file") as caught:
            read_file(tmp_path / name, bytes_max=4)
        assert caught.value.file == name


def test_an_object_may_begin_with_a_mark_and_hold_any_text() -> None:
    """The byte order mark that some editors write, and escaped pairs of surrogates, are good."""
    assert parse_json_object(b'\xef\xbb\xbf{"a": "\\ud83d\\ude00"}', file="f") == {"a": "😀"}
    assert parse_json_object(rb'{"a": "\\ud83d"}', file="f") == {"a": r"\ud83d"}


@pytest.mark.parametrize(
    "raw",
    [b"", b"{", b"\xff", rb'{"a": ["\udcff"]}', rb'{"\uD83D": 1}', b"[" * 200_000],
)
def test_what_is_not_json_is_refused(raw: bytes) -> None:
    """Half a character too: no message could carry the text."""
    with pytest.raises(InvalidModel, match="not JSON"):
        parse_json_object(raw, file="f")


def test_json_that_is_no_object_is_refused() -> None:
    """A list is JSON, but nothing that a model's file may be."""
    with pytest.raises(InvalidModel, match="not a JSON object"):
        parse_json_object(b"[]", file="f")
