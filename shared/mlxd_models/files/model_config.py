"""A model's config.json, and what its store says in its place."""

from __future__ import annotations

from typing import Any

from mlxd_models.files.model_source import Source, files_of
from mlxd_models.files.tensor_blobs import blob_quantization
from mlxd_shared.domain.errors import InvalidModel

CONFIG_FILE = "config.json"
_PACKING = "quantization"
_FORMER_PACKING = "quantization_config"


def read_model_config(source: Source) -> dict[str, Any]:
    """Return the object of config.json; for blobs with how they are packed, if they are.

    A store that packs weights keeps the config as it found it: what that says of an original's
    packing holds no longer.

    Raises:
        InvalidModel: missing, unreadable, over its bound, not JSON, or not an object; or of blobs
            the packing cannot be told.
    """
    files = files_of(source)
    if files.path_of(CONFIG_FILE) is None:
        raise InvalidModel("missing", file=CONFIG_FILE)
    values = files.read_json(CONFIG_FILE)
    packing = blob_quantization(files) if files.by_content and _PACKING not in values else None
    if packing is not None:
        values.pop(_FORMER_PACKING, None)
        values[_PACKING] = packing
    return values
