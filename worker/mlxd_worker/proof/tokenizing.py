"""Tokenizers of models that are on this machine: each is read as a load would, and spells a text.

Imports no MLX.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from mlxd_shared.domain.errors import MlxdError
from mlxd_worker.tokenizing.files import load_tokenizer

TEXT: Final = "The quick brown fox, 12 times. "


def check_tokenizer(path: Path) -> str | None:
    """Return what is wrong with a model's tokenizer, or None. Blocks on the disk."""
    try:
        tokenizer = load_tokenizer(path)
        ids = tokenizer.encode(TEXT)
        text = tokenizer.decode(ids)
    except MlxdError as error:
        return error.describe()
    # One that lowers letters or knows few of them is whole; one that gives none back is not.
    if set(text.lower()).isdisjoint(set(TEXT.lower()) - {" "}):
        return f"{TEXT!r} comes back as {text!r:.80}"
    return None
