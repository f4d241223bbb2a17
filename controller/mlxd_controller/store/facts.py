"""A model's folder to the facts that fit needs, from config.json and safetensors headers.

Invariants:
- No weights are read but the digest's samples: a folder of any size takes milliseconds.
- Every problem is an InvalidModel that names the file, and the key where there is one.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from mlxd_controller.store.caches import (
    LATENT,
    cache_sizes,
    feed_width,
    projected_values,
    recurrent_values,
)
from mlxd_controller.store.fields import invalid, layer_count, size
from mlxd_controller.store.packed import (
    FLOATS,
    is_aside,
    kept_bytes_of,
    packable,
    packed_bytes,
    packed_weights,
    values_of,
)
from mlxd_models.files.digest import model_digest
from mlxd_models.files.generation_defaults import read_generation_defaults
from mlxd_models.files.model_config import read_model_config
from mlxd_models.files.model_source import Source, files_of
from mlxd_models.files.modules import check_modules
from mlxd_models.files.nested_text import NESTED, TEXT_CONFIG, text_config, text_name
from mlxd_models.files.weights import TensorFact, read_model_dir
from mlxd_models.fit.facts import ModelFacts, Taken
from mlxd_models.sizes.cache_sizes import CacheSizes
from mlxd_models.sizes.packed_weights import unpacked_weight_values
from mlxd_models.sizes.pass_sizes import PassSizes
from mlxd_models.sizes.zoo_sizes import zoo_cache_sizes, zoo_context, zoo_pass_sizes
from mlxd_models.sizes.zoo_types import is_foreign
from mlxd_shared.domain.requests import SamplingOptions

TOKENIZER_FILE = "tokenizer.json"

_JOINED = re.compile(
    r"(.*)\.(?:[qkv]_proj|gate_proj|up_proj|in_proj_\w+|q_a_proj|kv_a_proj_with_mqa)\.\w+"
)
"""Names of tensors that are put together with others of their module while they are read."""

_PARTED = re.compile(r"(.*\.kv_b_proj)\.\w+")
"""Names of tensors that are taken apart when they have been read."""

_EXPERT = re.compile(r"\.experts\.\d+\.")
"""In names of tensors that are stored expert by expert, and put together while they are read."""

_LAYER = re.compile(r".*\blayers\.(\d+)\.(\w+)(?:\..*)?")
"""Names of modules of a layer: its number, and the module's first name."""

_PACKED_EXPERT = re.compile(r"(.*\.experts)\.(gate_up_proj|down_proj)(?:_\w+)?")
"""Names of experts' tensors that are stored together; gates and ups are put apart while reading."""


@dataclass(frozen=True, slots=True)
class _Sizes:
    """What config.json says of caches and passes."""

    caches: CacheSizes
    passes: PassSizes
    context_max: int


@dataclass(frozen=True, slots=True)
class Folder:
    """What reading a model gave."""

    digest: str
    facts: ModelFacts
    defaults: SamplingOptions


def read_folder(source: Source) -> Folder:
    """Return a model's digest and facts. Blocks on the disk.

    Raises:
        InvalidModel: config.json, generation_config.json or a weight file cannot be served, or a
            file that another one names is missing.
    """
    files = files_of(source)
    check_modules(files)
    values = read_model_config(files)
    facts = _facts(values, read_model_dir(files), tokenizer_bytes=files.nbytes(TOKENIZER_FILE))
    return Folder(model_digest(files), facts, read_generation_defaults(files))


def _facts(
    values: Mapping[str, Any], tensors: tuple[TensorFact, ...], *, tokenizer_bytes: int
) -> ModelFacts:
    names = values.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise invalid("architectures", f"{names!r} is not a list that starts with a name")
    kind = NESTED.get(names[0], names[0])
    values, own = _text(values, tensors, names[0]) if kind != names[0] else (values, tensors)
    kept = tuple(tensor for tensor in own if not _dropped(values, kind, tensor.name))
    stored = {tensor.name for tensor in kept}
    floats = [FLOATS[it.dtype] for it in kept if it.dtype in FLOATS and not is_aside(it, stored)]
    item_bytes = max(floats, default=4)
    packed = packed_weights(values, kept)
    sizes = _sizes(values, kind)
    return ModelFacts(
        architecture=names[0],
        stored_bytes=sum(tensor.nbytes for tensor in tensors),
        elements=sum(values_of(values, tensor, stored) for tensor in kept),
        item_bytes=item_bytes,
        heads=sizes.passes.heads,
        caches=sizes.caches,
        projected_values=sizes.passes.projected,
        hidden_size=sizes.passes.hidden,
        intermediate_size=sizes.passes.mlp,
        vocab_size=sizes.passes.vocab,
        context_length_max=sizes.context_max,
        unpacked_values=unpacked_weight_values(packed),
        packed_values=sum(count for _, count in packed),
        packed_bytes=packed_bytes(values, kept),
        packable={} if sizes.caches.foreign else packable(values, kept),
        recurrent_values=sizes.passes.recurrent,
        tokenizer_bytes=tokenizer_bytes,
        taken=_taken(values, kept, item_bytes=item_bytes),
        dropped_bytes=sum(tensor.nbytes for tensor in tensors)
        - sum(kept_bytes_of(tensor, stored, item_bytes=item_bytes) for tensor in kept),
    )


def _sizes(values: Mapping[str, Any], kind: str) -> _Sizes:
    if is_foreign(values):
        return _Sizes(zoo_cache_sizes(values), zoo_pass_sizes(values), zoo_context(values))
    passes = PassSizes(
        hidden=size(values, "hidden_size"),
        projected=projected_values(values, kind),
        mlp=feed_width(values, kind),
        heads=size(values, "num_attention_heads"),
        vocab=size(values, "vocab_size"),
        recurrent=recurrent_values(values, kind),
    )
    caches = cache_sizes(values, kind)
    return _Sizes(caches, passes, size(values, "max_position_embeddings"))


def _text(
    values: Mapping[str, Any], tensors: tuple[TensorFact, ...], architecture: str
) -> tuple[Mapping[str, Any], tuple[TensorFact, ...]]:
    """Return the config and the tensors of a model's text, as if it stood alone."""
    found = text_config(architecture, values)
    if found is None:
        raise invalid(TEXT_CONFIG, "missing, or not an object")
    named = ((text_name(tensor.name), tensor) for tensor in tensors)
    return found, tuple(replace(it, name=name) for name, it in named if name is not None)


def _dropped(values: Mapping[str, Any], architecture: str, name: str) -> bool:
    """Return whether a worker leaves a stored tensor out: copies, tables, heads for guessing."""
    tied = values.get("tie_word_embeddings") is True and name.startswith("lm_head.")
    return (
        tied
        or name.startswith("mtp.")
        or name.endswith(".rotary_emb.inv_freq")
        or (architecture in LATENT and _drafts(values, name))
    )


def _drafts(values: Mapping[str, Any], name: str) -> bool:
    """Return whether a tensor is of a layer after the last one: these draft tokens."""
    found = _LAYER.fullmatch(name)
    return found is not None and int(found[1]) >= layer_count(values)


def _taken(
    values: Mapping[str, Any], tensors: tuple[TensorFact, ...], *, item_bytes: int
) -> tuple[Taken, ...]:
    """Return what a load makes of the tensors: of each size what it makes last."""
    names = {tensor.name for tensor in tensors}
    groups: dict[tuple[str, bool], list[TensorFact]] = {}
    for tensor in tensors:
        groups.setdefault(_made_of(tensor.name), []).append(tensor)
    last: dict[tuple[int, int, bool], Taken] = {}
    later_values = later_bytes = 0
    for stem, joined in sorted(groups, key=lambda group: _turn(*group), reverse=True):
        parts = groups[stem, joined]
        count = sum(values_of(values, part, names) for part in parts)
        nbytes = sum(part.nbytes for part in parts)
        kept = sum(kept_bytes_of(part, names, item_bytes=item_bytes) for part in parts)
        widened = None if kept == nbytes else kept
        taken = Taken(count, nbytes, joined, later_values, later_bytes, widened)
        last.setdefault((count, nbytes, joined), taken)
        later_values, later_bytes = later_values + count, later_bytes + kept
    return tuple(last.values())


def _made_of(name: str) -> tuple[str, bool]:
    """Return which tensors make one together, by a common stem, and whether they are joined.

    One that is taken apart is there twice for a moment, as a joined one is.
    """
    stored = _PACKED_EXPERT.fullmatch(name)
    if stored is not None:
        return f"{stored[1]}.{stored[2]}", stored[2] == "gate_up_proj"
    together, experts = _EXPERT.subn(".experts.", name)
    found = _PARTED.fullmatch(together) or _JOINED.fullmatch(together)
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
