"""DeepSeek-V2: latents, and experts scored by a softmax; a group is as good as its best one."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from mlxd_models.families.common.fields import Fields
from mlxd_models.families.latent import config as latent
from mlxd_models.families.latent.tensors import latent_family

_GREEDY: Final = "greedy"
_BY_GROUP: Final = "group_limited_greedy"


def parse_deepseek_v2(config: Mapping[str, Any]) -> latent.LatentConfig:
    """Return the config of a `DeepseekV2ForCausalLM`."""
    fields = Fields(config)
    fields.demand("norm_topk_prob", only=False)
    if fields.has("scoring_func"):
        fields.demand("scoring_func", "softmax")
    method = fields.values.get("topk_method") or _GREEDY
    if method not in (_GREEDY, _BY_GROUP):
        problem = f"{method!r} is not supported; {_GREEDY!r} and {_BY_GROUP!r} are"
        raise fields.error("topk_method", problem)
    parsed = latent.parse_latent(fields)
    sparse = latent.first_layers_dense(fields, layers=parsed.decoder.layers, default=0)
    experts = latent.parse_experts(fields, sparse=sparse, normalised=False)
    groups = latent.parse_groups(fields, experts, best=1) if method == _BY_GROUP else None
    scaling = fields.positive("routed_scaling_factor", default=1.0)
    return latent.with_experts(parsed, replace(experts, groups=groups, scaling=scaling))


DEEPSEEK_V2: Final = latent_family(parse_deepseek_v2, "deepseek_v2")
