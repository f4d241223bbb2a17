"""One model over several ranks: what each has of it, and which models cannot be divided. Pure.

Invariants:
- All ranks have equally much: heads, and the inner values of a feed-forward, are divided evenly.
- The embedding, the head and the norms are whole on every rank.
- What cannot be divided is refused by name, before any weight is read.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from mlxd_models.describe import Description
from mlxd_models.families.common.decoder import ATTENTION, DOWN, GATED, SINKS, DecoderConfig
from mlxd_models.families.common.packing import ON_LOAD
from mlxd_models.families.common.tensors import TensorSpec
from mlxd_shared.domain.errors import InvalidModel, InvalidRequest
from mlxd_shared.domain.requests import LoadSpec

DIVIDED_BUILDER: Final = "mlxd_worker.models.families.llama"
"""What builds the models that can be divided."""

COLUMNS: Final = (*ATTENTION, *GATED)
"""Linears whose outputs are divided, each by itself where several are joined."""

ROWS: Final = ("self_attn.o_proj", DOWN)
"""Linears whose inputs are divided, and whose products are summed over the ranks."""


def check_divides(described: Description, spec: LoadSpec, ranks: int) -> None:
    """Refuse a model, or a form of its weights, that `ranks` ranks cannot share.

    Raises:
        InvalidModel: names the key of config.json, or the kind of layer.
        InvalidRequest: names the option.
    """
    its = described.config
    if described.family.builder != DIVIDED_BUILDER or not isinstance(its, DecoderConfig):
        raise _refusal(described, ranks, "its layers are of a kind that is not", "architectures")
    if its.experts is not None:
        raise _refusal(described, ranks, "experts are not", "architectures")
    if described.packed:
        raise _refusal(described, ranks, "packed weights are not", "quantization")
    if spec.weights in ON_LOAD:
        problem = f"{spec.weights.value}: packed weights are not divided over {ranks} ranks"
        raise InvalidRequest.of("options.weights", problem)
    sizes = {
        "num_attention_heads": its.heads,
        "num_key_value_heads": its.kv_heads,
        "intermediate_size": its.mlp,
    }
    for key, size in sizes.items():
        if size % ranks:
            problem = f"{size} cannot be divided over {ranks} ranks"
            raise InvalidModel(problem, file="config.json", field=key)


def rank_config(its: DecoderConfig, ranks: int) -> DecoderConfig:
    """Return the config of the part that one of the ranks has; they divide it."""
    return replace(
        its, heads=its.heads // ranks, kv_heads=its.kv_heads // ranks, mlp=its.mlp // ranks
    )


def rank_description(described: Description, ranks: int) -> Description:
    """Return the description of what one of the ranks has, for the fit alone.

    What is stored (`facts`) is not divided: the form of the weights follows from it.
    """
    specs = tuple(_part_of(spec, ranks) for spec in described.specs)
    values = sum(spec.values for spec in described.specs if spec.required)
    kept = sum(spec.values for spec in specs if spec.required)
    return replace(
        described,
        config=rank_config(described.config, ranks),
        specs=specs,
        stored_nbytes=described.stored_nbytes - (values - kept) * described.stored.nbytes,
    )


def _part_of(spec: TensorSpec, ranks: int) -> TensorSpec:
    stem, _, part = spec.name.rpartition(".")
    if stem.endswith(COLUMNS) or spec.name.endswith(SINKS):
        return replace(spec, shape=(spec.shape[0] // ranks, *spec.shape[1:]))
    if stem.endswith(ROWS) and part == "weight":
        return replace(spec, shape=(spec.shape[0], spec.shape[1] // ranks))
    return spec


def _refusal(described: Description, ranks: int, problem: str, field: str) -> InvalidModel:
    whole = f"{described.architecture}: {problem} divided over {ranks} ranks"
    return InvalidModel(whole, file="config.json", field=field)
