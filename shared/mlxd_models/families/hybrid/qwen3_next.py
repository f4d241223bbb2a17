"""Qwen3-Next: a Qwen3.5 whose layers send each token through a few experts and a gated shared one.

What a recurrent layer projects a row to is stored key head by key head.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from mlxd_models.families.common.decoder import WIDTH_MAX
from mlxd_models.families.common.experts import ExpertsConfig, SharedConfig
from mlxd_models.families.common.fields import Fields
from mlxd_models.families.hybrid.config import HybridConfig, parse_hybrid
from mlxd_models.families.hybrid.tensors import hybrid_family
from mlxd_models.families.qwen3_moe import parse_experts

SHARED: Final = "shared_expert"


def parse_qwen3_next(config: Mapping[str, Any]) -> HybridConfig:
    """Return the config of a `Qwen3NextForCausalLM`."""
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
    """Return which layers have experts, each with a gated one for all; None where none has."""
    experts = parse_experts(fields, layers=layers)
    width = fields.integer("shared_expert_intermediate_size", low=1, high=WIDTH_MAX)
    shared = SharedConfig(width, SHARED, gated=True)
    return None if experts is None else replace(experts, shared=shared)


QWEN3_NEXT: Final = hybrid_family(parse_qwen3_next, "qwen3_next")
