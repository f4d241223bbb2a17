"""Families by the name in config.json's `architectures[0]`.

A new one is a file of its own in this folder and one line in `REGISTRY`.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final, TypeAlias

from mlxd_models.families import gemma3, gpt_oss, llama, mistral, qwen2, qwen3, qwen3_moe
from mlxd_models.families.common.family import Family
from mlxd_models.families.common.fields import invalid
from mlxd_models.families.hybrid import qwen3_5, qwen3_5_moe, qwen3_next
from mlxd_models.families.latent import deepseek_v2, deepseek_v3, glm4_moe_lite
from mlxd_models.families.sighted import gemma3 as seeing_gemma3
from mlxd_models.families.sighted import llava, qwen2_5_vl, qwen3_5_vl, qwen3_vl

Registry: TypeAlias = Mapping[str, Family[Any]]


def find_family(registry: Registry, name: str) -> Family[Any]:
    """Return an architecture's family; raises InvalidModel, with the known ones, for others."""
    if name not in registry:
        problem = f"architecture {name!r} is not supported; known: {', '.join(sorted(registry))}"
        raise invalid("architectures", problem)
    return registry[name]


def architecture_of(config: Mapping[str, Any]) -> str:
    """Return `architectures[0]`; raises InvalidModel if there is no such name."""
    names = config.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise invalid("architectures", f"{names!r} is not a list that starts with a name")
    return names[0]


REGISTRY: Final[Registry] = MappingProxyType(
    {
        "DeepseekV2ForCausalLM": deepseek_v2.DEEPSEEK_V2,
        "DeepseekV3ForCausalLM": deepseek_v3.DEEPSEEK_V3,
        "Gemma3ForCausalLM": gemma3.GEMMA3,
        "Gemma3ForConditionalGeneration": seeing_gemma3.SEEING_GEMMA3,
        "Glm4MoeLiteForCausalLM": glm4_moe_lite.GLM4_MOE_LITE,
        "GptOssForCausalLM": gpt_oss.GPT_OSS,
        "LlamaForCausalLM": llama.LLAMA,
        "LlavaForConditionalGeneration": llava.LLAVA,
        "MistralForCausalLM": mistral.MISTRAL,
        "Qwen2ForCausalLM": qwen2.QWEN2,
        "Qwen2_5_VLForConditionalGeneration": qwen2_5_vl.QWEN2_5_VL,
        "Qwen3ForCausalLM": qwen3.QWEN3,
        "Qwen3MoeForCausalLM": qwen3_moe.QWEN3_MOE,
        "Qwen3NextForCausalLM": qwen3_next.QWEN3_NEXT,
        "Qwen3VLForConditionalGeneration": qwen3_vl.QWEN3_VL,
        "Qwen3VLMoeForConditionalGeneration": qwen3_vl.QWEN3_VL_MOE,
        "Qwen3_5ForCausalLM": qwen3_5.QWEN3_5,
        "Qwen3_5ForConditionalGeneration": qwen3_5_vl.QWEN3_5_VL,
        "Qwen3_5MoeForCausalLM": qwen3_5_moe.QWEN3_5_MOE,
        "Qwen3_5MoeForConditionalGeneration": qwen3_5_vl.QWEN3_5_MOE_VL,
    }
)
