"""Qwen3-MoE: a Qwen3 most of whose layers send each token through a few of many networks.

A layer has experts where `decoder_sparse_step` comes round, but for those in `mlp_only_layers`.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from mlxd_models.families.common.decoder import LAYERS_MAX, WIDTH_MAX, DecoderConfig
from mlxd_models.families.common.experts import ExpertsConfig, experts_of
from mlxd_models.families.common.family import llama_family
from mlxd_models.families.common.fields import Fields
from mlxd_models.families.common.windows import refuse_sliding
from mlxd_models.families.qwen3 import parse_unbiased


def parse_qwen3_moe(config: Mapping[str, Any]) -> DecoderConfig:
    """Return the config of a `Qwen3MoeForCausalLM`."""
    fields = Fields(config)
    fields.demand("use_sliding_window", only=False)
    if fields.integer("shared_expert_intermediate_size", low=0, high=WIDTH_MAX, default=0):
        raise fields.error("shared_expert_intermediate_size", "a shared expert is not supported")
    parsed = parse_unbiased(fields)
    refuse_sliding(fields, layers=parsed.layers)
    return replace(parsed, experts=parse_experts(fields, layers=parsed.layers))


def parse_experts(fields: Fields, *, layers: int) -> ExpertsConfig | None:
    """Return which layers have experts, and what these are; None where none has."""
    count = experts_of(fields, "num_experts", layers=layers)
    step = fields.integer("decoder_sparse_step", low=1, high=LAYERS_MAX, default=1)
    dense = _dense_layers(fields)
    sparse = tuple((at + 1) % step == 0 and at not in dense for at in range(layers))
    experts = ExpertsConfig(
        count=count,
        chosen=fields.integer("num_experts_per_tok", low=1, high=count),
        mlp=fields.integer("moe_intermediate_size", low=1, high=WIDTH_MAX),
        normalised=fields.flag("norm_topk_prob", default=False),
        layers=sparse,
    )
    return experts if any(sparse) else None


def _dense_layers(fields: Fields) -> frozenset[int]:
    if not fields.has("mlp_only_layers"):
        return frozenset()
    named = fields.values["mlp_only_layers"]
    if not isinstance(named, list) or any(type(layer) is not int for layer in named):
        raise fields.error("mlp_only_layers", f"{named!r} is not a list of layers")
    return frozenset(named)


QWEN3_MOE: Final = llama_family(parse_qwen3_moe, "qwen3_moe")
