"""Where a model is read from: a path that leads to it, or its files as they were found there."""

from __future__ import annotations

from pathlib import Path

from mlxd_models.files.model_files import file_error
from mlxd_models.files.ollama_manifest import open_manifest
from mlxd_models.files.stored_files import StoredFiles, open_folder

Source = Path | StoredFiles
"""A model's folder or manifest; or its files, by whoever reads it more than once."""


def files_of(source: Source) -> StoredFiles:
    """Return a model's files, looked up on the disk if need be; raises InvalidModel for none."""
    if isinstance(source, StoredFiles):
        return source
    try:
        is_file = source.is_file()
    except OSError as error:  # such as a path that is too long
        raise file_error(error, source.name) from error
    return open_manifest(source) if is_file else open_folder(source)
