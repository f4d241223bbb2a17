"""Qwen3-Next: a Qwen3.5 whose layers send each token through a few experts and a gated shared one.

Invariants:
- Only the reading of config.json is its own; weights and arithmetic are the Qwen3.5 files'.
- What a recurrent layer projects a row to is stored key head by key head.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from mlxd_models.families.common.decoder import WIDTH_MAX
from mlxd_models.families.common.experts import ExpertsConfig, SharedConfig
from mlxd_models.families.common.family import Family
from mlxd_models.families.common.fields import Fields
from mlxd_models.families.hybrid.config import HybridConfig, parse_hybrid
from mlxd_models.families.hybrid.tensors import HYBRID_BUILDER, qwen3_5_footprint, qwen3_5_tensors
from mlxd_models.families.qwen3_moe import parse_experts

SHARED: Final = "shared_expert"


def parse_qwen3_next(config: Mapping[str, Any]) -> HybridConfig:
    """Return the config of a `Qwen3NextForCausalLM`.

    Raises:
        InvalidModel: a key is missing, mistyped, out of range or asks for what is not supported.
    """
    fields = Fields(config)
    if not fields.has("norm_topk_prob"):
        # Its default differs from reader to reader.
        raise fields.error("norm_topk_prob", "missing")
    parsed = parse_hybrid(fields)
    experts = parse_shared_experts(fields, layers=parsed.decoder.layers)
    return replace(
        parsed,
        decoder=replace(parsed.decoder, experts=experts),
        delta=replace(parsed.delta, grouped=True),
    )


def parse_shared_experts(fields: Fields, *, layers: int) -> ExpertsConfig | None:
    """Return which layers have experts, each with a gated one for all; None where none has.

    Raises:
        InvalidModel: a key is missing, mistyped or out of range.
    """
    experts = parse_experts(fields, layers=layers)
    width = fields.integer("shared_expert_intermediate_size", low=1, high=WIDTH_MAX)
    shared = SharedConfig(width, SHARED, gated=True)
    return None if experts is None else replace(experts, shared=shared)


QWEN3_NEXT: Final = Family(
    builder=HYBRID_BUILDER,
    model_type="qwen3_next",
    parse=parse_qwen3_next,
    tensors=qwen3_5_tensors,
    footprint=qwen3_5_footprint,
)
