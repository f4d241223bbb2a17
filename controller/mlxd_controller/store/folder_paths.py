"""User-given paths to the model folders that they lead to. Blocks on the disk."""

from __future__ import annotations

from pathlib import Path

from mlxd_models.files.model_files import machine_short
from mlxd_models.files.stored_files import GGUF_PROBLEM, GGUF_SUFFIX
from mlxd_shared.domain.errors import InvalidModel, InvalidRequest, ModelNotFound


def existing_folder(path: Path) -> Path:
    """Return the folder that `path` leads to.

    Raises:
        ModelNotFound: there is none, or it cannot be accessed.
        InvalidModel: it leads to weights for another engine.
        InvalidRequest: the resolved path is not text.
    """
    try:
        if path.is_dir():
            return resolve_folder(path)
        is_file = path.is_file()
    except OSError as error:  # such as a path that is too long
        short = machine_short(error, path.name)
        if short is not None:
            raise short from error
        raise ModelNotFound(str(path), error.strerror or "unreadable") from error
    if is_file and path.suffix == GGUF_SUFFIX:
        raise InvalidModel(GGUF_PROBLEM, file=path.name)
    problem = "it is a file; a model is a folder" if is_file else "there is no such folder"
    raise ModelNotFound(str(path), problem)


def resolve_folder(path: Path) -> Path:
    """Return the path without links, checked to be encodable in messages.

    Raises:
        InvalidRequest: it is not UTF-8, or a loop of links.
    """
    try:
        path = path.resolve()
        str(path).encode()
    except (RuntimeError, UnicodeEncodeError) as error:
        problem = "not UTF-8" if isinstance(error, UnicodeEncodeError) else "a loop of links"
        raise InvalidRequest.of("model", f"the path {str(path)!r} is {problem}") from error
    return path
