"""DeepSeek-V3 and its kin (Kimi K2): latents, and experts in groups that sigmoids are scores of."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from mlxd_models.families.common.experts import ExpertsConfig, Scoring
from mlxd_models.families.common.fields import Fields
from mlxd_models.families.latent import config as latent
from mlxd_models.families.latent.tensors import latent_family

BEST_OF_GROUP: Final = 2


def parse_deepseek_v3(config: Mapping[str, Any]) -> latent.LatentConfig:
    """Return the config of a `DeepseekV3ForCausalLM`."""
    fields = Fields(config)
    for key in ("n_group", "topk_group", "routed_scaling_factor"):
        if not fields.has(key):
            raise fields.error(key, "missing")
    parsed = latent.parse_latent(fields)
    sparse = latent.first_layers_dense(fields, layers=parsed.decoder.layers, default=None)
    return latent.with_experts(parsed, parse_corrected(fields, sparse=sparse))


def parse_corrected(fields: Fields, *, sparse: tuple[bool, ...]) -> ExpertsConfig:
    """Return experts that sigmoids are the scores of, corrected for the choice."""
    for key, only in (("topk_method", "noaux_tc"), ("scoring_func", "sigmoid")):
        if fields.has(key):
            fields.demand(key, only)
    normalised = fields.flag("norm_topk_prob", default=True)
    experts = latent.parse_experts(fields, sparse=sparse, normalised=normalised)
    return replace(
        experts,
        scoring=Scoring.SIGMOID,
        corrected=True,
        groups=latent.parse_groups(fields, experts, best=BEST_OF_GROUP),
        scaling=fields.positive("routed_scaling_factor"),
    )


DEEPSEEK_V3: Final = latent_family(parse_deepseek_v3, "deepseek_v3")
