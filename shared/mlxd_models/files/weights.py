"""Facts about a model's weights from safetensors headers alone, however its store keeps them.

Invariants:
- Weights are one file, or an index and its shards, or blobs of tensors (`tensor_blobs`).
- A shard named by an index is a plain file name in the model's own folder.
- A tensor that is stored twice is refused, but for blobs: there equal ones are one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mlxd_models.files.large_json import parse_large_object
from mlxd_models.files.model_source import Source, files_of
from mlxd_models.files.safetensors_header import TensorFact, read_header
from mlxd_models.files.stored_files import StoredFiles
from mlxd_models.files.tensor_blobs import Copy, read_blobs
from mlxd_shared.config import SAFETENSORS_HEADER_BYTES_MAX, SHARDS_MAX
from mlxd_shared.domain.errors import InvalidModel

__all__ = ["INDEX_FILE", "SINGLE_FILE", "TensorFact", "Weights", "read_header", "read_weights"]

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class Weights:
    """All tensors of a model; and those stored once more, each with the one that is taken."""

    facts: tuple[TensorFact, ...]
    copies: tuple[Copy, ...] = ()


def read_weights(source: Source) -> Weights:
    """Return what the headers of a model's weights say.

    Raises:
        InvalidModel: no weights, a broken file, an index that disagrees with its shards, or blobs
            that disagree with each other.
    """
    files = files_of(source)
    if files.by_content:
        return Weights(*read_blobs(files))
    if files.path_of(INDEX_FILE) is None:
        return Weights(read_header(_single_file(files)))
    placed = _read_index(files)
    shards = sorted(set(placed.values()))
    if len(shards) > SHARDS_MAX:
        problem = f"names {len(shards)} shards, at most {SHARDS_MAX} are read"
        raise InvalidModel(problem, file=INDEX_FILE)
    facts = tuple(fact for shard in shards for fact in read_header(files.named[shard]))
    _check_index(placed, facts)
    return Weights(facts)


def _single_file(files: StoredFiles) -> Path:
    path = files.path_of(SINGLE_FILE)
    if path is not None:
        return path
    if files.others:
        kind = Path(files.others[0]).suffix
        problem = f"{kind} holds no weights that are served; mlxd reads safetensors"
        raise InvalidModel(problem, file=files.others[0])
    raise InvalidModel(f"missing, and there is no {INDEX_FILE}", file=SINGLE_FILE)


def _read_index(files: StoredFiles) -> dict[str, str]:
    raw = files.read(INDEX_FILE, bytes_max=SAFETENSORS_HEADER_BYTES_MAX)
    index = parse_large_object(raw or b"", file=files.label(INDEX_FILE))
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise InvalidModel("not a map of tensors to files", file=INDEX_FILE, field="weight_map")
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or Path(shard).name != shard or shard in {"", ".", ".."}:
            problem = f"{shard!r} is not a file name inside the model's folder"
            raise InvalidModel(problem, file=INDEX_FILE, field=name)
        if files.path_of(shard) is None:
            raise InvalidModel(f"its shard {shard!r} is missing", file=INDEX_FILE, field=name)
    return weight_map


def _check_index(placed: Mapping[str, str], facts: tuple[TensorFact, ...]) -> None:
    seen: dict[str, str] = {}
    for fact in facts:
        if fact.name in seen:
            problem = f"stored twice, in {seen[fact.name]} and in {fact.file.name}"
            raise InvalidModel(problem, file=INDEX_FILE, field=fact.name)
        seen[fact.name] = fact.file.name
    for name in sorted(placed.keys() | seen.keys()):
        if placed.get(name) != seen.get(name):
            problem = f"the index says {placed.get(name)!r}, the shards say {seen.get(name)!r}"
            raise InvalidModel(problem, file=INDEX_FILE, field=name)
