"""Which files of a repository a model needs. Pure.

Formats that can run code when read, such as pickles, are never chosen, even if a pattern or the
repository's own index asks for them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import PurePosixPath
from typing import Any

from mlxd_models.files.stored_files import OTHER_WEIGHTS
from mlxd_models.files.weights import INDEX_FILE, SINGLE_FILE
from mlxd_shared.domain.errors import InvalidModel, InvalidRequest

FILES_MAX = 100_000
FILE_NAME_CHARS_MAX = 1024
TEXTS = ("*.json", "*.jinja", "tokenizer*", "merges.txt", "vocab.txt")
"""At the top level: configuration, tokenizer, templates."""
TEXTS_BELOW = ("additional_chat_templates/*.jinja", "1_Pooling/config.json")
"""In subfolders: further templates, and how texts become vectors."""

_PICKLES = (OTHER_WEIGHTS - {".gguf"}) | {".dill", ".joblib", ".npy", ".pyc"}
_WEIGHTS = ".safetensors"


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """One file of a repository; its size and the hash of its content if the server reports them."""

    name: str
    nbytes: int = 0
    content: str = ""


def check_names(files: Sequence[RemoteFile]) -> None:
    """Refuse a repository with names that lead out of it or are too long, or with too many.

    Raises:
        InvalidModel: names the first such file.
    """
    if len(files) > FILES_MAX:
        raise InvalidModel(f"{len(files)} files, at most {FILES_MAX} are accepted")
    for file in files:
        parts = PurePosixPath(file.name).parts
        if len(file.name) > FILE_NAME_CHARS_MAX:
            limit = f"a name of over {FILE_NAME_CHARS_MAX} characters"
            raise InvalidModel(limit, file=f"{file.name:.80}…")
        odd = "\\" in file.name or not file.name.isprintable() or file.name.startswith("/")
        if odd or not parts or ".." in parts:
            raise InvalidModel("a name that leads out of the repository", file=file.name)


def choose_needed(
    files: Sequence[RemoteFile], *, index: Mapping[str, Any] | None, include: Collection[str] = ()
) -> tuple[RemoteFile, ...]:
    """Return the files that a model needs, and those matching `include`, sorted by name.

    index: the content of the repository's index of shards, if it has one.

    Raises:
        InvalidModel: it has no weights that could be served; names those it has.
        InvalidRequest: a pattern matches pickles.
    """
    by_name = {file.name: file for file in files}
    wanted = set(_weights(by_name, index))
    wanted |= {
        name for name in by_name if _matches(name, (*TEXTS, *TEXTS_BELOW)) and not is_pickle(name)
    }
    for pattern in include:
        more = {name for name in by_name if fnmatchcase(name, pattern)}
        pickles = sorted(filter(is_pickle, more))
        if pickles:
            problem = f"{pattern!r} matches {pickles[0]}, which can run code when it is read"
            raise InvalidRequest.of("include", problem)
        wanted |= more
    return tuple(by_name[name] for name in sorted(wanted))


def is_pickle(name: str) -> bool:
    """Return whether a format can run code when read, or is for another library alone."""
    return PurePosixPath(name).suffix.lower() in _PICKLES


def _weights(by_name: Mapping[str, RemoteFile], index: Mapping[str, Any] | None) -> Collection[str]:
    if index is not None:
        return _shards(by_name, index)
    if SINGLE_FILE in by_name:
        return {SINGLE_FILE}
    tops = {name for name in by_name if name.endswith(_WEIGHTS) and "/" not in name}
    if tops:
        return tops
    others = sorted(name for name in by_name if PurePosixPath(name).suffix in OTHER_WEIGHTS)
    if not others:
        raise InvalidModel("the repository has no weights")
    kind = "a pickle, which can run code when it is read" if is_pickle(others[0]) else "GGUF"
    raise InvalidModel(f"{kind}; mlxd needs safetensors, and there are none", file=others[0])


def _shards(by_name: Mapping[str, RemoteFile], index: Mapping[str, Any]) -> Collection[str]:
    placed = index.get("weight_map")
    if not isinstance(placed, dict) or not placed:
        raise InvalidModel("names no shards", file=INDEX_FILE, field="weight_map")
    for name, shard in placed.items():
        if not isinstance(shard, str) or "/" in shard or not shard.endswith(_WEIGHTS):
            problem = f"{shard!r:.80} is not a safetensors file beside the index"
            raise InvalidModel(problem, file=INDEX_FILE, field=name)
        if shard not in by_name:
            raise InvalidModel(f"its shard {shard!r:.80} is missing", file=INDEX_FILE, field=name)
    return set(placed.values())


def _matches(name: str, patterns: Collection[str]) -> bool:
    return any(
        fnmatchcase(name, pattern) and name.count("/") == pattern.count("/") for pattern in patterns
    )
