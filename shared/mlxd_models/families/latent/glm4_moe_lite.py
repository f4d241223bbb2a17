"""GLM-4-MoE-lite (GLM-4.7-Flash): a DeepSeek-V3 with defaults of its own."""

from collections.abc import Mapping
from typing import Any, Final

from mlxd_models.families.common.fields import Fields
from mlxd_models.families.latent import config as latent
from mlxd_models.families.latent.deepseek_v3 import parse_corrected
from mlxd_models.families.latent.tensors import latent_family

_DEFAULTS: Final[Mapping[str, Any]] = {
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.8,
    "rms_norm_eps": 1e-5,
}
_LAYERS: Final = "mlp_layer_types"
_DENSE_FIRST: Final = "first_k_dense_replace"


def parse_glm4_moe_lite(config: Mapping[str, Any]) -> latent.LatentConfig:
    """Return the config of a `Glm4MoeLiteForCausalLM`."""
    stated = {key: value for key, value in config.items() if value is not None}
    fields = Fields({**config, **_DEFAULTS, **stated})
    nested = fields.values.get("rope_parameters")
    theta = nested.get("rope_theta") if isinstance(nested, Mapping) else None
    if theta is None and not fields.has("rope_theta"):
        raise fields.error("rope_theta", "missing")
    parsed = latent.parse_latent(fields)
    sparse = _sparse_layers(fields, layers=parsed.decoder.layers)
    return latent.with_experts(parsed, parse_corrected(fields, sparse=sparse))


def _sparse_layers(fields: Fields, *, layers: int) -> tuple[bool, ...]:
    """Return which layers have experts: those named, or all but the first ones."""
    by_rule = latent.first_layers_dense(fields, layers=layers, default=1)
    named = fields.layers_of(_LAYERS, ("sparse", "dense"), layers)
    if named is not None and fields.has(_DENSE_FIRST) and named != by_rule:
        raise fields.error(_LAYERS, f"contradicts {_DENSE_FIRST}")
    return by_rule if named is None else named


GLM4_MOE_LITE: Final = latent_family(parse_glm4_moe_lite, "glm4_moe_lite")
