"""Qwen3.5-MoE, text only: a Qwen3.5 all of whose layers have experts and a gated shared one.

The chosen experts' weights sum to one, and no layer is dense: what says otherwise is refused.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from mlxd_models.families.common.fields import Fields
from mlxd_models.families.hybrid.config import HybridConfig, parse_hybrid
from mlxd_models.families.hybrid.qwen3_next import parse_shared_experts
from mlxd_models.families.hybrid.tensors import hybrid_family


def parse_qwen3_5_moe(config: Mapping[str, Any]) -> HybridConfig:
    """Return the config of a `Qwen3_5MoeForCausalLM`."""
    fields = Fields(config)
    fields.demand("norm_topk_prob", only=True)
    # A width that no layer has: all of them have experts.
    inner = {"intermediate_size": config.get("moe_intermediate_size")}
    parsed = parse_hybrid(Fields({**config, **inner}))
    experts = parse_shared_experts(fields, layers=parsed.decoder.layers)
    if experts is None or not all(experts.layers):
        raise fields.error("mlp_only_layers", "dense layers are not supported")
    experts = replace(experts, normalised=True, fused=True)
    return replace(parsed, decoder=replace(parsed.decoder, experts=experts))


QWEN3_5_MOE: Final = hybrid_family(parse_qwen3_5_moe, "qwen3_5_moe_text")
