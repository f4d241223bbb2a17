"""A model as its files describe it: config understood, every tensor accounted for, no weight read.

Invariants:
- The one judgement of whether a model can be served: who plans a load and who carries it out get
  the same description, or the same refusal, which names file and key or tensor.
- Files are checked whole (headers, names, shapes, types): what the checkpoint holds beyond the
  family's own list is an error, not a leftover.
- Blocks on the disk for config.json, an index and headers, however large the weights are.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from mlxd_models.families.common.family import Family, Footprint
from mlxd_models.families.common.fields import some_names
from mlxd_models.families.common.packing import (
    BLOCK_SCALES,
    BYTE_DTYPE,
    WORD_DTYPE,
    Packing,
    Recipe,
)
from mlxd_models.families.common.stored_layouts import as_stored
from mlxd_models.families.common.tensors import TensorSpec
from mlxd_models.families.registry import REGISTRY, Registry, architecture_of, find_family
from mlxd_models.files.image_settings import NOT_STATED, states_images
from mlxd_models.files.model_config import TOKENIZER_FILE, read_model_config
from mlxd_models.files.model_source import Source, files_of
from mlxd_models.files.stored_files import StoredFiles
from mlxd_models.files.tensor_blobs import Copy
from mlxd_models.files.weights import SINGLE_FILE, TensorFact, Weights, read_weights
from mlxd_models.sizes.cache_sizes import Held
from mlxd_models.sizes.weight_forms import TOWER_PREFIX, FloatType, is_expert
from mlxd_models.sizes.zoo_types import zoo_type
from mlxd_shared.domain.errors import InvalidModel

KEPT_NBYTES: Final = {WORD_DTYPE: 4, BYTE_DTYPE: 1, "F32": 4}
"""What a value of a packed weight's parts takes that stay as they are stored, by its type."""


@dataclass(frozen=True, slots=True)
class Description:
    """What a model is, from its config and headers alone."""

    path: Path
    architecture: str
    """As config.json names it."""
    family: Family[Any]
    config: Any
    """The family's own."""
    facts: tuple[TensorFact, ...]
    """Stored tensors, by the names that the family has for them."""
    specs: tuple[TensorSpec, ...]
    """What these stand for."""
    stored_nbytes: int
    """What all stored tensors take there, those included that are left unread."""
    tokenizer_nbytes: int
    """The size of the tokenizer's file; 0 if there is none."""
    copies: tuple[Copy, ...] = ()
    """Tensors that a store holds again, which must be the same."""
    unseeing: str = ""
    """Why images are not seen by a model that has a tower; empty: they are, or it has none."""
    stored_as: FloatType | None = None
    """The form of most numbers, where the tensors here are parts of others; None: as they say."""

    @property
    def weight_values(self) -> int:
        """Values of the weights that stay in memory, once unpacked."""
        return sum(spec.values for spec in self.specs if spec.required)

    @property
    def packed(self) -> bool:
        """Whether weights that stay in memory are stored packed."""
        return any(spec.packed for spec in self.specs if spec.required)

    @property
    def kept(self) -> Held:
        """What stays in memory where packed weights stay packed."""
        return sum((kept_of(spec) for spec in self.specs), start=Held(0, 0))

    @property
    def stored(self) -> FloatType:
        """The form that holds most of the bytes that are stored as numbers."""
        if self.stored_as is not None:
            return self.stored_as
        nbytes = dict.fromkeys(FloatType, 0)
        for fact in self.facts:
            if fact.dtype in nbytes:
                nbytes[FloatType(fact.dtype)] += fact.nbytes
        return max(nbytes, key=lambda form: nbytes[form])

    @property
    def footprint(self) -> Footprint:
        """What the model takes besides its weights."""
        return self.family.footprint(self.config)


def describe(
    source: Source, *, registry: Registry = REGISTRY, foreign: Family[Any] | None = None
) -> Description:
    """Describe a model by its config and headers alone. Blocks on the disk.

    A model that has a tower, and no file that says how images are made ready, is its text alone.

    foreign: what describes models that only mlx-lm has an architecture for, where its extra is
    installed; None refuses them as unknown.

    Raises:
        InvalidModel: anything that keeps it from being served; names file and key or tensor.
    """
    stored = files_of(source)
    values = read_model_config(stored)
    family, unseeing = _family_of(values, registry, foreign, stored)
    weights: Weights | None = None
    if family.blind is not None:
        weights = read_weights(stored)
        has_tower = _has_tower(weights.facts, family)
        unseeing = NOT_STATED if has_tower and not states_images(stored) else ""
        family = family if has_tower and not unseeing else family.blind
    config = family.parse(values)
    if weights is None:
        weights = read_weights(stored)
    facts = _name_tensors(weights.facts, family)
    try:
        specs = _check_specs(family, config, facts)
    except InvalidModel as error:
        own_names = {fact.name: fact.stored_name for fact in facts}
        field_name = own_names.get(error.field, error.field)
        raise InvalidModel(error.problem, file=error.file, field=field_name) from None
    return Description(
        path=stored.path,
        architecture=architecture_of(values),
        family=family,
        config=config,
        facts=facts,
        specs=specs,
        stored_nbytes=sum(fact.nbytes for fact in weights.facts),
        tokenizer_nbytes=stored.nbytes(TOKENIZER_FILE),
        copies=weights.copies,
        unseeing=unseeing,
    )


def kept_of(spec: TensorSpec) -> Held:
    """Return what stays in memory of a tensor: packed ones stay so, others live as numbers."""
    count, packing = math.prod(spec.shape), spec.packing
    if not spec.required or spec.name.endswith(f".{BLOCK_SCALES}"):
        return Held(0, 0)
    if packing is not None and packing.stays and spec.dtype is not None:
        return Held(0, count * KEPT_NBYTES[spec.dtype])
    return Held(0, count * FloatType.F32.nbytes) if spec.exact else Held(count, 0)


def packings_on_load(specs: Iterable[TensorSpec], recipe: Recipe) -> dict[str, Packing]:
    """Return how a load packs the weights that are stored in numbers, by name."""
    packings = {
        spec.name: recipe.of(spec.name, spec.shape)
        for spec in specs
        if spec.packable and not spec.packed
    }
    return {name: packing for name, packing in packings.items() if packing is not None}


def _family_of(
    values: Mapping[str, Any],
    registry: Registry,
    foreign: Family[Any] | None,
    stored: StoredFiles,
) -> tuple[Family[Any], str]:
    """Return the family of our own, or a foreign one where another library has one and we none.

    With why a foreign one that has a tower is read as text; empty: it is not.
    """
    name = architecture_of(values)
    if foreign is not None and name not in registry:
        own_types = {family.model_type for family in registry.values()}
        if values.get("model_type") not in own_types:
            seeing = None if foreign.seeing is None else foreign.seeing(values)
            reads_text = zoo_type(values) is not None
            if seeing is not None and (not reads_text or states_images(stored)):
                return seeing, ""
            if reads_text:
                return foreign, "" if seeing is None else NOT_STATED
    return find_family(registry, name), ""


def _has_tower(stored: Sequence[TensorFact], family: Family[Any]) -> bool:
    """Tell whether a checkpoint holds anything of a tower."""
    return any((family.name_of(fact.name) or "").startswith(TOWER_PREFIX) for fact in stored)


def _check_specs(
    family: Family[Any],
    config: Any,  # noqa: ANN401 - the family's own
    facts: Sequence[TensorFact],
) -> tuple[TensorSpec, ...]:
    """Return what the stored tensors are; nothing is missing, or left over."""
    if family.restore is not None:
        return family.restore(config, facts)
    specs = as_stored(family.tensors(config), {fact.name for fact in facts})
    _check_tensors(facts, specs)
    _check_experts(facts, specs)
    return specs


def _name_tensors(stored: Sequence[TensorFact], family: Family[Any]) -> tuple[TensorFact, ...]:
    """Return the tensors that are the family's, by its names, which must differ."""
    facts: dict[str, TensorFact] = {}
    for fact in stored:
        name = family.name_of(fact.name)
        if name is None:
            continue
        if name in facts:
            raise fact.error(f"is {name}, which is stored under another name too")
        facts[name] = replace(fact, name=name, own_name=fact.stored_name)
    return tuple(facts.values())


def _check_tensors(facts: Sequence[TensorFact], specs: Sequence[TensorSpec]) -> None:
    """Refuse tensors that are missing, of no use, or of another shape or type than specified."""
    wanted = {spec.stored_name: spec for spec in specs}
    stored = {fact.name: fact for fact in facts}
    missing = {spec.stored_name for spec in specs if spec.required} - stored.keys()
    if missing:
        file = facts[0].file.name if facts else SINGLE_FILE
        raise InvalidModel(f"missing tensors: {some_names(missing)}", file=file, field=min(missing))
    unexpected = stored.keys() - wanted.keys()
    if unexpected:
        first = stored[min(unexpected)]
        problem = f"tensors of no use to this config: {some_names(unexpected)}"
        raise first.error(problem)
    for fact in facts:
        spec = wanted[fact.name]
        expected = spec if spec.source is None else spec.source
        if fact.shape not in (expected.shape, spec.other_shape):
            problem = f"shape {list(fact.shape)}, the config says {list(expected.shape)}"
            raise fact.error(problem)
        allowed = tuple(FloatType) if expected.dtype is None else (expected.dtype,)
        if fact.dtype not in allowed:
            raise fact.error(f"dtype {fact.dtype} is not one of {', '.join(allowed)}")


def _check_experts(facts: Sequence[TensorFact], specs: Sequence[TensorSpec]) -> None:
    """Refuse experts that become one here and are packed unlike each other."""
    stored = {fact.name: fact for fact in facts}
    firsts: dict[str, TensorSpec] = {}
    for spec in specs:
        if not (spec.required and spec.joins and is_expert(spec.name)) or spec.beside:
            continue
        if spec.name.endswith(".bias"):
            continue
        first = firsts.setdefault(spec.joins, spec)
        if (spec.packed and spec.packing) != (first.packed and first.packing):
            problem = f"packed unlike {first.name}, with which it is one here"
            raise stored[spec.stored_name].error(problem)
