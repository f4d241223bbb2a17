"""What the tokenizer library runs into while a text streams, on the thread of all streams."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from mlxd_shared.domain.errors import InvalidModel
from mlxd_worker.text.tokenizer import Detokenizer


class Unwritable:
    """A tokenizer that the library's stream cannot decode with."""

    def encode(self, text: str, *, add_special_tokens: bool) -> SimpleNamespace:
        """Return one id."""
        return SimpleNamespace(ids=[len(text) + add_special_tokens])


def test_what_the_library_runs_into_names_its_file() -> None:
    """It is the stream's own error, with its cause, and ends nothing else."""
    stream = Detokenizer(cast("Any", Unwritable()), skip_special=True)
    with pytest.raises(InvalidModel, match="cannot write a text") as caught:
        stream.push(1)
    assert caught.value.file == "tokenizer.json"
    with pytest.raises(InvalidModel, match="cannot write a text"):
        stream.finish()
