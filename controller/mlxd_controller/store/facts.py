"""A model's folder to the facts that fit needs, from config.json and safetensors headers.

Invariants:
- No weights are read but the digest's samples: a folder of any size takes milliseconds.
- Every problem is an InvalidModel that names the file, and the key where there is one.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlxd_controller.core.fit import ModelFacts, Taken
from mlxd_controller.store.caches import (
    cache_sizes,
    feed_width,
    projected_values,
    recurrent_values,
)
from mlxd_controller.store.fields import CONFIG_FILE, invalid, size
from mlxd_shared import config
from mlxd_shared.digest import model_digest
from mlxd_shared.errors import InvalidModel
from mlxd_shared.generation_defaults import read_generation_defaults
from mlxd_shared.model_files import parse_json_object, read_file
from mlxd_shared.packed_weights import unpacked_weight_values
from mlxd_shared.requests import SamplingOptions
from mlxd_shared.weights import TensorFact, read_model_dir

TOKENIZER_FILE = "tokenizer.json"

_JOINED = re.compile(r"(.*)\.(?:[qkv]_proj|gate_proj|up_proj|in_proj_\w+)\.\w+")
"""Names of tensors that are put together with others of their module while they are read."""

_EXPERT = re.compile(r"\.experts\.\d+\.")
"""In names of tensors that are stored expert by expert, and put together while they are read."""

_LAYER = re.compile(r".*\blayers\.(\d+)\.(\w+)(?:\..*)?")
"""Names of modules of a layer: its number, and the module's first name."""

_FLOATS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}


@dataclass(frozen=True, slots=True)
class Folder:
    """What reading a model's folder gave."""

    digest: str
    facts: ModelFacts
    defaults: SamplingOptions


def read_folder(path: Path) -> Folder:
    """Return a folder's digest and facts. Blocks on the disk.

    Raises:
        InvalidModel: config.json, generation_config.json or a weight file cannot be served.
    """
    raw = read_file(path / CONFIG_FILE, bytes_max=config.CONFIG_FILE_BYTES_MAX)
    if raw is None:
        raise InvalidModel("missing", file=CONFIG_FILE)
    values = parse_json_object(raw, file=CONFIG_FILE)
    facts = _facts(values, read_model_dir(path), tokenizer_bytes=_size_of(path / TOKENIZER_FILE))
    return Folder(model_digest(path), facts, read_generation_defaults(path))


def _facts(
    values: Mapping[str, Any], tensors: tuple[TensorFact, ...], *, tokenizer_bytes: int
) -> ModelFacts:
    names = values.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise invalid("architectures", f"{names!r} is not a list that starts with a name")
    kept = tuple(tensor for tensor in tensors if not _dropped(values, tensor.name))
    floats = [tensor for tensor in kept if tensor.dtype in _FLOATS]
    return ModelFacts(
        architecture=names[0],
        stored_bytes=sum(tensor.nbytes for tensor in tensors),
        elements=_elements(values, kept),
        item_bytes=max((_FLOATS[tensor.dtype] for tensor in floats), default=4),
        heads=size(values, "num_attention_heads"),
        caches=cache_sizes(values, names[0]),
        projected_values=projected_values(values, names[0]),
        hidden_size=size(values, "hidden_size"),
        intermediate_size=feed_width(values, names[0]),
        vocab_size=size(values, "vocab_size"),
        context_length_max=size(values, "max_position_embeddings"),
        unpacked_values=unpacked_weight_values(_packed_weights(values, kept)),
        recurrent_values=recurrent_values(values, names[0]),
        tokenizer_bytes=tokenizer_bytes,
        taken=_taken(values, kept),
        dropped_bytes=sum(tensor.nbytes for tensor in tensors)
        - sum(tensor.nbytes for tensor in kept),
    )


def _dropped(values: Mapping[str, Any], name: str) -> bool:
    """Return whether a worker leaves a stored tensor out: copies, tables, heads for guessing."""
    tied = values.get("tie_word_embeddings") is True and name.startswith("lm_head.")
    return tied or name.startswith("mtp.") or name.endswith(".rotary_emb.inv_freq")


def _packed_weights(
    values: Mapping[str, Any], tensors: tuple[TensorFact, ...]
) -> list[tuple[str, int]]:
    """Return each packed weight, and how many values it stands for."""
    names = {tensor.name for tensor in tensors}
    found: list[tuple[str, int]] = []
    for tensor in tensors:
        stem, _, _ = tensor.name.rpartition(".")
        if tensor.dtype == "U32" and f"{stem}.scales" in names:
            found.append((tensor.name, math.prod(tensor.shape) * 32 // _bits(values, stem)))
    return found


def _elements(values: Mapping[str, Any], tensors: tuple[TensorFact, ...]) -> int:
    """Count values once dequantised: a packed tensor has one beside it that is named `.scales`."""
    names = {tensor.name for tensor in tensors}
    return sum(_values_of(values, tensor, names) for tensor in tensors)


def _values_of(values: Mapping[str, Any], tensor: TensorFact, names: Collection[str]) -> int:
    """Return the values that a tensor adds to the model; scales and offsets add none."""
    stem, _, part = tensor.name.rpartition(".")
    packed = f"{stem}.scales" in names
    if packed and part in ("scales", "biases"):
        return 0
    count = math.prod(tensor.shape)
    return count * 32 // _bits(values, stem) if packed and tensor.dtype == "U32" else count


def _bits(values: Mapping[str, Any], stem: str) -> int:
    quantization = values.get("quantization")
    if not isinstance(quantization, dict):
        raise invalid("quantization", f"missing, and {stem} is stored packed")
    own = quantization.get(stem)
    bits = own.get("bits") if isinstance(own, dict) else quantization.get("bits")
    if type(bits) is not int or bits not in range(1, 33):
        raise invalid("quantization", f"bits of {stem} are {bits!r}")
    return bits


def _taken(values: Mapping[str, Any], tensors: tuple[TensorFact, ...]) -> tuple[Taken, ...]:
    """Return what a load makes of the tensors: of each size what it makes last."""
    names = {tensor.name for tensor in tensors}
    groups: dict[tuple[str, bool], list[TensorFact]] = {}
    for tensor in tensors:
        groups.setdefault(_made_of(tensor.name), []).append(tensor)
    last: dict[tuple[int, int, bool], Taken] = {}
    later_values = later_bytes = 0
    for stem, joined in sorted(groups, key=lambda group: _turn(*group), reverse=True):
        parts = groups[stem, joined]
        count = sum(_values_of(values, part, names) for part in parts)
        nbytes = sum(part.nbytes for part in parts)
        taken = Taken(count, nbytes, joined, later_values, later_bytes)
        last.setdefault((count, nbytes, joined), taken)
        later_values, later_bytes = later_values + count, later_bytes + nbytes
    return tuple(last.values())


def _made_of(name: str) -> tuple[str, bool]:
    """Return which tensors make one together, by a common stem, and whether they are joined."""
    together, experts = _EXPERT.subn(".experts.", name)
    found = _JOINED.fullmatch(together)
    stem = found[1] if found else together.rpartition(".")[0]
    return stem, found is not None or experts > 0


def _turn(stem: str, joined: bool) -> tuple[int, int, int]:  # noqa: FBT001 - the parts of a key
    """Return when a load makes a module's tensors, to be compared with others' turns.

    The embedding, then layer by layer the mixer and the feed-forward, in both what is joined before
    what leads out of it; then the norm and the head.
    """
    found = _LAYER.fullmatch(stem)
    if found is None:
        return (-1 if "embed" in stem else sys.maxsize, 0, 0)
    return (int(found[1]), int(found[2] == "mlp"), int(not joined))


def _size_of(path: Path) -> int:
    """Return a file's size; 0 where there is none, which the worker refuses."""
    try:
        return path.stat().st_size
    except OSError:
        return 0
