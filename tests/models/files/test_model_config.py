"""Reading config.json: an object of bounded size, or an error about the file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mlxd_models.files.model_config import read_model_config
from mlxd_shared.domain.errors import InvalidModel
from tests.worker.tiny import config_with, write_config

FILES: dict[str, tuple[bytes | None, str]] = {
    "missing": (None, "missing"),
    "empty": (b"", "not JSON"),
    "not JSON": (b"{", "not JSON"),
    "not UTF-8": (b'{"a": "\xff"}', "not JSON"),
    "not an object": (b"[]", "not a JSON object"),
    "too deep": (b"[" * 200_000, "not JSON"),
    "too long": (b" " * (16 * 2**20 + 1), "bytes long"),
}


@pytest.mark.parametrize("name", FILES)
def test_a_broken_file_is_named(name: str, tmp_path: Path) -> None:
    """A config.json that is missing or no object is an error about that file."""
    content, words = FILES[name]
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)

    with pytest.raises(InvalidModel) as caught:
        read_model_config(tmp_path)

    assert caught.value.file == "config.json"
    assert words in caught.value.problem


def test_a_folder_for_another_engine_is_called_that(tmp_path: Path) -> None:
    """What it lacks is no news to somebody who has such a model; other weights have a config."""
    (tmp_path / "m-Q4_K_M.gguf").write_bytes(b"GGUF")
    with pytest.raises(InvalidModel, match=r"m-Q4_K_M\.gguf: GGUF: .* another engine"):
        read_model_config(tmp_path)
    (tmp_path / "m-Q4_K_M.gguf").rename(tmp_path / "m.bin")
    with pytest.raises(InvalidModel, match=r"config\.json: missing"):
        read_model_config(tmp_path)


def test_reading_is_not_rewriting(tmp_path: Path) -> None:
    """What was written is what is read."""
    write_config(tmp_path, config_with())

    assert read_model_config(tmp_path) == json.loads((tmp_path / "config.json").read_text())
