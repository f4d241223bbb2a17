"""A dense, text-only Qwen3.5: what models with recurrent layers have in common, and no experts."""

from collections.abc import Mapping
from typing import Any, Final

from mlxd_models.families.common.decoder import WIDTH_MAX
from mlxd_models.families.common.fields import Fields
from mlxd_models.families.hybrid.config import HybridConfig, parse_hybrid
from mlxd_models.families.hybrid.tensors import hybrid_family


def parse_qwen3_5(config: Mapping[str, Any]) -> HybridConfig:
    """Return the config of a `Qwen3_5ForCausalLM`."""
    fields = Fields(config)
    if fields.integer("num_experts", low=0, high=WIDTH_MAX, default=0):
        raise fields.error("num_experts", "a mixture of experts is not supported")
    return parse_hybrid(fields)


QWEN3_5: Final = hybrid_family(parse_qwen3_5, "qwen3_5_text")
