"""Models that mlx-lm alone has an architecture for, by what config.json and headers say of them.

Invariants:
- What names alone can tell is refused here, for who plans as for who loads. The rest only mlx-lm
  knows: whoever has it puts its own reading in the place of this one.
- Sizes are the most that the names may mean (`sizes.zoo_sizes`): no plan is too small.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from mlxd_models.families.common.family import Family, Footprint
from mlxd_models.families.common.fields import Fields, invalid
from mlxd_models.families.common.packing import (
    BYTE_DTYPE,
    WORD_BITS,
    WORD_DTYPE,
    Packings,
    parse_packing,
)
from mlxd_models.families.common.stored_layouts import as_stored
from mlxd_models.families.common.tensors import TensorSpec
from mlxd_models.files.weights import TensorFact
from mlxd_models.sizes.zoo_sizes import zoo_cache_sizes, zoo_context, zoo_pass_sizes
from mlxd_models.sizes.zoo_types import ZOO_EXTRA, ZOO_VERSION, zoo_type

REFUSED: Final[Mapping[str, str]] = {
    "plamo3": "reads prompts by a window one wider than that by which it goes on",
}
"""Types whose models in mlx-lm contradict themselves, so that nobody knows what is right."""

VOCAB_MIN: Final[Mapping[str, int]] = {"phi3small": 100_352}
"""Types that write to ids of their own, beyond the end of logits for a smaller vocabulary."""

COUNT_MAX: Final = 4096
"""Layers, heads or experts that a config may name."""

_COUNTED = ("layer", "expert", "head")
_SIZED = ("dim", "size", "vocab", "rank", "token")
_ASIDE = frozenset({"scales", "biases", "global_scale", "weight_scale_inv", "weight_scale",
                    "weight_scale_2", "input_scale"})  # fmt: skip
"""The names of the parts of packed weights besides their values."""


@dataclass(frozen=True, slots=True)
class ForeignConfig:
    """A config that is not taken apart."""

    name: str
    """mlx-lm's module."""
    values: Mapping[str, Any]
    packings: Packings | None


def parse_foreign(config: Mapping[str, Any]) -> ForeignConfig:
    """Return what is known of a config without mlx-lm.

    Raises:
        InvalidModel: mlx-lm has no such model; the config brings code along, names absurdly many
            parts or packs in an unknown way; or the model would write beyond its logits.
    """
    name = zoo_type(config)
    if name is None:
        problem = f"{config.get('model_type')!r} is not one of mlx-lm's models"
        raise invalid("model_type", problem)
    if config.get("model_file") is not None:
        raise invalid("model_file", "names code to be run; mlxd runs none that a model brings")
    if name in REFUSED:
        raise invalid("model_type", f"mlx-lm's {name} {REFUSED[name]}")
    _check_counts(config)
    least = VOCAB_MIN.get(name, 1)
    if zoo_pass_sizes(config).vocab < least:
        raise invalid("vocab_size", f"mlx-lm's {name} needs {least} tokens at least")
    return ForeignConfig(name, config, parse_packing(Fields(config)))


def parse_installed(config: Mapping[str, Any]) -> ForeignConfig:
    """Return the same where this installation has mlx-lm; raises as `check_installed`, too."""
    stated = parse_foreign(config)
    check_installed(stated.name, installed_version())
    return stated


def check_installed(name: str, installed: str | None) -> None:
    """Raise InvalidModel, naming what to install, unless mlx-lm is there in its one version."""
    extra = f"install mlxd[{ZOO_EXTRA}]"
    if installed is None:
        problem = f"{name!r} is served through mlx-lm alone, which is not installed: {extra}"
        raise invalid("model_type", problem)
    if installed != ZOO_VERSION:
        problem = f"{name!r} is served through mlx-lm {ZOO_VERSION} alone, {installed} is installed"
        raise invalid("model_type", f"{problem}: {extra}")


def installed_version() -> str | None:
    """Return which mlx-lm is installed; None: none."""
    try:
        return importlib.metadata.version("mlx-lm")
    except importlib.metadata.PackageNotFoundError:
        return None


def foreign_footprint(config: ForeignConfig) -> Footprint:
    """Return the most that the model may take besides its weights."""
    values = config.values
    return Footprint(zoo_context(values), zoo_cache_sizes(values), zoo_pass_sizes(values))


def foreign_specs(config: ForeignConfig, facts: Sequence[TensorFact]) -> tuple[TensorSpec, ...]:
    """Return the specs of stored tensors; raises InvalidModel if the config contradicts them."""
    names = {fact.name for fact in facts}
    tied = config.values.get("tie_word_embeddings") is True
    specs = []
    for fact in facts:
        stem, _, part = fact.name.rpartition(".")
        if part in _ASIDE and f"{stem}.weight" in names:
            continue
        left = fact.name.startswith("mtp.") or fact.name.endswith(".rotary_emb.inv_freq")
        left = left or (tied and fact.name.startswith("lm_head."))
        spec = TensorSpec(fact.name, fact.shape, required=not left, joins=_stack_of(fact.name))
        specs.append(_unpack(config.packings, spec, fact, names))
    return tuple(spec for spec in as_stored(specs, names) if spec.stored_name in names)


def _unpack(
    packings: Packings | None, spec: TensorSpec, fact: TensorFact, names: Collection[str]
) -> TensorSpec:
    """Return a tensor as it would be in numbers, and how it is packed if it is."""
    stem, _, part = fact.name.rpartition(".")
    words = fact.dtype == WORD_DTYPE and f"{stem}.scales" in names
    halves = fact.dtype == BYTE_DTYPE and f"{stem}.weight_scale" in names
    blocks = f"{stem}.weight_scale_inv" in names
    if part != "weight" or len(fact.shape) < 2 or not (words or halves or blocks):
        return spec
    packing = None if packings is None else packings.own.get(stem, packings.common)
    if packing is None:
        raise invalid("quantization", f"missing, and {stem} is stored packed")
    *outputs, inputs = fact.shape
    if words:
        return replace(spec, shape=(*outputs, inputs * WORD_BITS // packing.bits), packing=packing)
    if halves and len(fact.shape) == 2:
        return replace(spec, shape=(*outputs, 2 * inputs), packing=packing)
    return replace(spec, packing=packing if blocks else None)


def _stack_of(name: str) -> str:
    """Return the tensor into which mlx-lm joins an expert's; empty if it is not an expert's."""
    before, experts, after = name.partition(".experts.")
    number, _, inner = after.partition(".")
    return f"{before}{experts}{inner}" if experts and number.isdecimal() else ""


def _check_counts(values: Mapping[str, Any]) -> None:
    """Refuse numbers of parts that would keep Python busy: a model is made of so many objects."""
    none: tuple[str, ...] = ()
    left = [(none, values)]  # not by recursion: objects may be nested deeper than calls
    while left:
        path, part = left.pop()
        for key, value in part.items():
            if isinstance(value, Mapping):
                left.append(((*path, key), value))
            counts = any(word in key for word in _COUNTED) and not any(w in key for w in _SIZED)
            if counts and type(value) is int and value > COUNT_MAX:
                raise invalid(".".join((*path, key)), f"{value} is above {COUNT_MAX}")


def no_tensors(config: object) -> tuple[TensorSpec, ...]:
    """Return nothing: the stored tensors are taken as they are."""
    del config
    return ()


FOREIGN: Final = Family(
    builder="mlxd_worker.models.zoo.adapter",
    parse=parse_foreign,
    tensors=no_tensors,
    footprint=foreign_footprint,
    restore=foreign_specs,
)
"""Whoever loads them has mlx-lm, or not: it is in another installation."""

INSTALLED: Final = replace(FOREIGN, parse=parse_installed)
"""Whoever loads them is of this installation."""
