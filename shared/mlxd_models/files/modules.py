"""modules.json: the parts of a model of sentence-transformers, and whether what they name is there.

Invariants:
- A file that is named there and missing refuses the model, for whoever loads or reckons it: texts
  would become other vectors without a word.
- What is there and not served is no matter of this file.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from mlxd_models.files.model_files import parse_json_object
from mlxd_models.files.model_source import Source, files_of
from mlxd_shared.domain.errors import InvalidModel

MODULES_FILE: Final = "modules.json"
POOLING: Final = "Pooling"
POOLING_FOLDER: Final = "1_Pooling"
POOLING_FILE: Final = f"{POOLING_FOLDER}/config.json"


@dataclass(frozen=True, slots=True)
class Module:
    """One part: the last name of its type, and its folder in the model's own."""

    kind: str
    path: str


def read_modules(source: Source) -> tuple[Module, ...] | None:
    """Return a model's modules in order, if a file names them; raises InvalidModel if it is bad."""
    raw = files_of(source).read(MODULES_FILE)
    if raw is None:
        return None
    # A list, where our reader of files knows objects.
    listed = parse_json_object(b'{"modules": %b}' % raw, file=MODULES_FILE)["modules"]
    modules: list[Module] = []
    for item in listed if isinstance(listed, list) else [listed]:
        match item:
            case {"type": str(kind), "path": str(path)}:
                modules.append(Module(kind.rpartition(".")[2], path))
            case _:
                raise InvalidModel("no list of modules with their types and paths", MODULES_FILE)
    return tuple(modules)


def has_pooling(source: Source) -> bool:
    """Return whether a model's files say how its texts become vectors. Blocks on the disk.

    False if modules.json cannot be read: a request for vectors then gets the error.
    """
    files = files_of(source)
    try:
        modules = read_modules(files)
    except InvalidModel:
        return False
    if modules is None:
        return files.path_of(POOLING_FILE) is not None
    return any(module.kind == POOLING for module in modules)


def check_modules(source: Source) -> None:
    """Raise InvalidModel if a model's pooling is named, and missing. Blocks on the disk."""
    files = files_of(source)
    there = files.path_of(POOLING_FILE) is not None
    try:
        modules = read_modules(files) or ()
    except InvalidModel:
        return  # told to who asks for vectors; a model generates without them
    if not there and Module(POOLING, POOLING_FOLDER) in modules:
        raise InvalidModel(f"missing, and {MODULES_FILE} names it", file=POOLING_FILE)
