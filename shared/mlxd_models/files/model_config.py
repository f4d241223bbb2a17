"""config.json, or what a store says in its place, and whether there is a tokenizer.json to read."""

from __future__ import annotations

from typing import Any, Final

from mlxd_models.files.model_source import Source, files_of
from mlxd_models.files.stored_files import GGUF_PROBLEM, GGUF_SUFFIX
from mlxd_models.files.tensor_blobs import blob_quantization
from mlxd_shared.config import TOKENIZER_FILE_BYTES_MAX
from mlxd_shared.domain.errors import InvalidModel

CONFIG_FILE = "config.json"
TOKENIZER_FILE: Final = "tokenizer.json"
"""The one format of tokenizers that is served."""
TOKENIZER_CONFIG_FILE: Final = "tokenizer_config.json"
SPECIAL_TOKENS_FILE: Final = "special_tokens_map.json"

_PACKING = "quantization"
_FORMER_PACKING = "quantization_config"


def read_model_config(source: Source) -> dict[str, Any]:
    """Return the object of config.json; for blobs with how they are packed, if they are.

    A store that packs weights keeps the config as it found it: what that says of an original's
    packing holds no longer.

    Raises:
        InvalidModel: missing, also because the weights are of another format; unreadable, over its
            bound, not JSON, or not an object; or of blobs the packing cannot be told.
    """
    files = files_of(source)
    if files.path_of(CONFIG_FILE) is None:
        gguf = [name for name in files.others if name.endswith(GGUF_SUFFIX)]
        if gguf:
            raise InvalidModel(GGUF_PROBLEM, file=gguf[0])
        raise InvalidModel("missing", file=CONFIG_FILE)
    values = files.read_json(CONFIG_FILE)
    packing = blob_quantization(files) if files.by_content and _PACKING not in values else None
    if packing is not None:
        values.pop(_FORMER_PACKING, None)
        values[_PACKING] = packing
    return values


def check_tokenizer_file(source: Source) -> None:
    """Refuse a model without a tokenizer's file, or with one too large; nothing is read of it.

    Raises:
        InvalidModel: it is missing, empty, over TOKENIZER_FILE_BYTES_MAX, no regular file, or a
            link that cannot be followed.
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


def no_tokenizer() -> InvalidModel:
    """Return the error about a model that has no such file."""
    return InvalidModel("is missing; mlxd reads this format only", file=TOKENIZER_FILE)
