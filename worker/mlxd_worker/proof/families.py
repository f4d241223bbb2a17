"""A small config of every family that the registry has. Imports no MLX.

Invariants:
- Widths at which every kernel serves: heads of 64, inputs that are multiples of 256.
- What a family has beyond the sizes is written once, here; others choose sizes of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

NESTED: Final = "Gemma3ForConditionalGeneration"
"""Its config is that of its text, one level down, beside a tower's."""
SIGHTED: Final = "LlavaForConditionalGeneration"
"""So is this one's."""
SHAPED: Final = "Qwen2_5_VLForConditionalGeneration"
"""This one's lies flat beside a tower's, and its heads turn by three axes."""
STACKED: Final = (
    "Qwen3VLForConditionalGeneration",
    "Qwen3VLMoeForConditionalGeneration",
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForConditionalGeneration",
)
"""These are of a text one level down, whose heads turn by three axes by turns, beside a tower's."""

SIZES: Final[Mapping[str, Any]] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 512,
    "max_position_embeddings": 1024,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
WIDE: Final[Mapping[str, Any]] = {
    **SIZES,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
"""A Llama of 27 million values: what times are taken on where a CPU computes."""
WIDEST: Final[Mapping[str, Any]] = {
    **WIDE,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
"""One of 400 million: the same elsewhere."""

_EXPERTS: Final[Mapping[str, Any]] = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
}
_SHARED: Final[Mapping[str, Any]] = {**_EXPERTS, "shared_expert_intermediate_size": 64}
_HYBRID: Final[Mapping[str, Any]] = {
    "partial_rotary_factor": 0.25,
    "full_attention_interval": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
}
_LATENT: Final[Mapping[str, Any]] = {
    "head_dim": None,
    "num_key_value_heads": 4,
    "kv_lora_rank": 64,
    "q_lora_rank": 64,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 32,
    "v_head_dim": 48,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
}
_TOWER: Final[Mapping[str, Any]] = {
    "model_type": "clip_vision_model",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 8,
}
_MARKS: Final[Mapping[str, Any]] = {
    "mm_tokens_per_image": 4,
    "image_token_index": 5,
    "boi_token_index": 6,
    "eoi_token_index": 7,
}
_SHAPED_TOWER: Final[Mapping[str, Any]] = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "patch_size": 4,
    "window_size": 16,
    "fullatt_block_indexes": [1],
}
_STACKED_TOWER: Final[Mapping[str, Any]] = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "patch_size": 4,
    "num_position_embeddings": 16,
}
OWN: Final[Mapping[str, Mapping[str, Any]]] = {
    "DeepseekV2ForCausalLM": {
        **_LATENT, "q_lora_rank": None, "topk_method": "greedy", "scoring_func": "softmax",
        "norm_topk_prob": False,
    },
    "DeepseekV3ForCausalLM": _LATENT,
    "Gemma3ForCausalLM": {"sliding_window": 128, "sliding_window_pattern": 2},
    NESTED: {"sliding_window": 128},
    "Glm4MoeLiteForCausalLM": _LATENT,
    "GptOssForCausalLM": {
        "sliding_window": 128, "num_local_experts": 6, "num_experts_per_tok": 2,
        "rope_scaling": {"rope_type": "default"},
    },
    "LlamaForCausalLM": {},
    SIGHTED: {"model_type": "llama"},
    "MistralForCausalLM": {"sliding_window": 128},
    "Qwen2ForCausalLM": {},
    SHAPED: {},
    "Qwen3ForCausalLM": {},
    "Qwen3MoeForCausalLM": _EXPERTS,
    "Qwen3NextForCausalLM": {**_HYBRID, **_SHARED},
    "Qwen3VLForConditionalGeneration": {},
    "Qwen3VLMoeForConditionalGeneration": _EXPERTS,
    "Qwen3_5ForConditionalGeneration": _HYBRID,
    "Qwen3_5MoeForConditionalGeneration": {**_HYBRID, **_SHARED},
    "Qwen3_5ForCausalLM": _HYBRID,
    "Qwen3_5MoeForCausalLM": {**_HYBRID, **_SHARED},
}  # fmt: skip
"""What each family's config has besides, or otherwise."""


def config_of(architecture: str, sizes: Mapping[str, Any] = SIZES) -> dict[str, Any]:
    """Return a family's config.json of these sizes."""
    own = {**sizes, **OWN[architecture]}
    if architecture == NESTED:
        tower = {**_TOWER, "model_type": "siglip_vision_model"}
        own = {"text_config": own, "vision_config": tower, "tie_word_embeddings": False, **_MARKS}
    if architecture == SIGHTED:
        own = {"text_config": own, "vision_config": _TOWER, "image_token_id": 5}
    if architecture == SHAPED:
        pairs = own["head_dim"] // 2
        others = (pairs - pairs // 4) // 2
        sections = [pairs - 2 * others, others, others]
        tower = {**_SHAPED_TOWER, "out_hidden_size": own["hidden_size"]}
        rope = {"type": "mrope", "mrope_section": sections}
        own = {**own, "rope_scaling": rope, "vision_config": tower, "image_token_id": 5}
    if architecture in STACKED:
        own = _put_beside(own, deep=[] if "linear_conv_kernel_dim" in own else [0])
    return {"architectures": [architecture], **own}


def _put_beside(text: Mapping[str, Any], *, deep: list[int]) -> dict[str, Any]:
    """Return a text's config beside a tower's, whose layers `deep` give more than goes through."""
    pairs = int(text["head_dim"] * text.get("partial_rotary_factor", 1)) // 2
    sections = [pairs - 2 * (pairs // 4), pairs // 4, pairs // 4]
    rope = {"type": "default", "mrope_section": sections, "mrope_interleaved": True}
    width = {"out_hidden_size": text["hidden_size"], "deepstack_visual_indexes": deep}
    tower = {**_STACKED_TOWER, **width}
    nested = {**text, "rope_scaling": rope}
    return {"text_config": nested, "vision_config": tower, "image_token_id": 5}


def routes(architecture: str) -> bool:
    """Return whether a family has experts: a rounding may then choose another one."""
    return any("experts" in key for key in OWN[architecture])
