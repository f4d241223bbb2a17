"""What a path leads to that somebody wants to load: a folder, or a reason why it is none."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlxd_controller.store.folder_paths import existing_folder
from mlxd_shared.domain.errors import InvalidModel, ModelNotFound


def test_a_file_is_called_what_it_is(tmp_path: Path) -> None:
    """Of another engine, or just no folder; a link to a folder is the folder."""
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    (tmp_path / "m.safetensors").write_bytes(b"")
    (tmp_path / "link").symlink_to(tmp_path)

    with pytest.raises(InvalidModel, match=r"m\.gguf: GGUF: .* another engine"):
        existing_folder(tmp_path / "m.gguf")
    with pytest.raises(ModelNotFound, match="it is a file; a model is a folder"):
        existing_folder(tmp_path / "m.safetensors")
    with pytest.raises(ModelNotFound, match="there is no such folder"):
        existing_folder(tmp_path / "nothing")
    assert existing_folder(tmp_path / "link") == tmp_path
