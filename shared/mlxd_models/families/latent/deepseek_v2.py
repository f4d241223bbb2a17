"""DeepSeek-V2: latents, and experts that a softmax scores; each group is as good as its best one.

Invariants:
- Only the reading of config.json is its own; weights and arithmetic are the latent files'.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from mlxd_models.families.common.family import Family
from mlxd_models.families.common.fields import Fields
from mlxd_models.families.latent.config import (
    LatentConfig,
    first_layers_dense,
    parse_experts,
    parse_groups,
    parse_latent,
    with_experts,
)
from mlxd_models.families.latent.tensors import LATENT_BUILDER, latent_footprint, latent_tensors

_GREEDY: Final = "greedy"
_BY_GROUP: Final = "group_limited_greedy"


def parse_deepseek_v2(config: Mapping[str, Any]) -> LatentConfig:
    """Return the config of a `DeepseekV2ForCausalLM`.

    Raises:
        InvalidModel: a key is missing, mistyped, out of range or asks for what is not supported.
    """
    fields = Fields(config)
    if fields.flag("norm_topk_prob", default=False):
        raise fields.error("norm_topk_prob", "true is not supported by this architecture")
    if fields.values.get("scoring_func") not in (None, "softmax"):
        raise fields.error("scoring_func", "only 'softmax' is supported by this architecture")
    method = fields.values.get("topk_method") or _GREEDY
    if method not in (_GREEDY, _BY_GROUP):
        problem = f"{method!r} is not supported; {_GREEDY!r} and {_BY_GROUP!r} are"
        raise fields.error("topk_method", problem)
    parsed = parse_latent(fields)
    sparse = first_layers_dense(fields, layers=parsed.decoder.layers, default=0)
    experts = parse_experts(fields, sparse=sparse, normalised=False)
    groups = parse_groups(fields, experts, best=1) if method == _BY_GROUP else None
    scaling = fields.positive("routed_scaling_factor", default=1.0)
    return with_experts(parsed, replace(experts, groups=groups, scaling=scaling))


DEEPSEEK_V2: Final = Family(
    builder=LATENT_BUILDER,
    model_type="deepseek_v2",
    parse=parse_deepseek_v2,
    tensors=latent_tensors,
    footprint=latent_footprint,
)
