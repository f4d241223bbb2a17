"""tokenizer.json, the one format of tokenizers that is served: whether there is one to read.

What stands beside it, of its special tokens and chat template, is small: that it is JSON is looked
at here too.
"""

from __future__ import annotations

from typing import Final

from mlxd_models.files.model_source import Source, files_of
from mlxd_shared.config import TOKENIZER_FILE_BYTES_MAX
from mlxd_shared.domain.errors import InvalidModel

TOKENIZER_FILE: Final = "tokenizer.json"
TOKENIZER_CONFIG_FILE: Final = "tokenizer_config.json"
SPECIAL_TOKENS_FILE: Final = "special_tokens_map.json"


def check_tokenizer_file(source: Source) -> None:
    """Refuse a model without a tokenizer's file, or with one too large; nothing is read of it.

    Raises:
        InvalidModel: it is missing, empty, over TOKENIZER_FILE_BYTES_MAX, no regular file, or a
            link that cannot be followed; or a file beside it is there, and is no JSON object.
    """
    files = files_of(source)
    path = files.path_of(TOKENIZER_FILE)
    if path is None:
        raise no_tokenizer()
    if not path.is_file():
        raise InvalidModel("not a regular file", file=TOKENIZER_FILE)
    nbytes = files.nbytes(TOKENIZER_FILE)
    if not 0 < nbytes <= TOKENIZER_FILE_BYTES_MAX:
        problem = "empty" if not nbytes else f"over {TOKENIZER_FILE_BYTES_MAX} bytes long"
        raise InvalidModel(problem, file=files.label(TOKENIZER_FILE))
    for beside in (TOKENIZER_CONFIG_FILE, SPECIAL_TOKENS_FILE):
        files.read_json(beside)


def no_tokenizer() -> InvalidModel:
    """Return the error about a model that has no such file."""
    return InvalidModel("is missing; mlxd reads this format only", file=TOKENIZER_FILE)
