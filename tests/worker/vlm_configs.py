"""Configurations of mlx-vlm's types that see, small enough for random weights."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

PLACE, START, END = 5, 6, 9
"""What stands for an image, and what is around one."""

_TEXT: Final[Mapping[str, Any]] = MappingProxyType(
    {
        "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": False,
    }
)  # fmt: skip
_IDS: Final[Mapping[str, Any]] = MappingProxyType(
    {"image_token_id": PLACE, "video_token_id": 94, "vision_start_token_id": START}
)
_SECTIONS: Final[Mapping[str, Any]] = MappingProxyType(
    {"type": "mrope", "mrope_section": [4, 2, 2]}
)
_GLM_TOWER: Final[Mapping[str, Any]] = MappingProxyType(
    {
        "depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "patch_size": 4,
        "image_size": 24, "out_hidden_size": 64, "spatial_merge_size": 2, "temporal_patch_size": 2,
    }
)  # fmt: skip
_GLM_IDS: Final[Mapping[str, Any]] = MappingProxyType(
    {**_IDS, "image_start_token_id": START, "image_end_token_id": END, "vision_end_token_id": END}
)


def _glm(name: str, tower_type: str, **text: Any) -> dict[str, Any]:
    nested = {**_TEXT, **text}
    if "rope_parameters" in text:
        del nested["rope_theta"]
    return {
        "model_type": name,
        "architectures": ["Glm4vForConditionalGeneration"],
        **_GLM_IDS,
        "text_config": nested,
        "vision_config": {**_GLM_TOWER, "model_type": tower_type},
    }


CONFIGS: Final[Mapping[str, dict[str, Any]]] = MappingProxyType(
    {
        "qwen2_vl": {
            "model_type": "qwen2_vl", "architectures": ["Qwen2VLForConditionalGeneration"],
            **_TEXT, **_IDS, "rope_scaling": dict(_SECTIONS),
            "vision_config": {
                "model_type": "qwen2_vl", "depth": 2, "embed_dim": 32, "hidden_size": 64,
                "num_heads": 2, "mlp_ratio": 2, "in_channels": 3, "patch_size": 4,
                "spatial_patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2,
            },
        },
        "dots_ocr": {
            "model_type": "dots_ocr", "architectures": ["DotsOCRForCausalLM"],
            **_TEXT, **_IDS, "attention_bias": True,
            "vision_config": {
                "model_type": "dots_vit", "embed_dim": 32, "hidden_size": 64,
                "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
                "num_channels": 3, "patch_size": 4, "spatial_merge_size": 2,
                "temporal_patch_size": 1,
            },
        },
        "mage_vl": {
            "model_type": "mage_vl", "architectures": ["MageVLForConditionalGeneration"], **_IDS,
            "text_config": {**_TEXT, "model_type": "qwen3", "head_dim": 16},
            "vision_config": {
                "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
                "intermediate_size": 48, "patch_size": 4, "image_size": 24, "out_hidden_size": 64,
                "text_hidden_size": 64, "spatial_merge_size": 2, "temporal_patch_size": 1,
            },
        },
        "glm4v": _glm(
            "glm4v", "glm4v", model_type="glm4v_text", partial_rotary_factor=0.5, eos_token_id=[1],
            rope_scaling={"rope_type": "default", "mrope_section": [2, 1, 1]}, attention_bias=True,
        ),
        "glm4v_moe": _glm(
            "glm4v_moe", "glm4v_moe", model_type="glm4v_moe_text", partial_rotary_factor=0.5,
            head_dim=16, moe_intermediate_size=32, norm_topk_prob=True, n_group=1, topk_group=1,
            n_shared_experts=1, n_routed_experts=6, routed_scaling_factor=1.0,
            num_experts_per_tok=2, first_k_dense_replace=1, use_qk_norm=True, attention_bias=True,
            rope_scaling={"type": "default", "mrope_section": [2, 1, 1]},
        ),
        "glm_ocr": _glm(
            "glm_ocr", "glm_ocr_vision", model_type="glm_ocr_text", head_dim=16,
            rope_parameters={
                "rope_type": "default", "mrope_section": [4, 2, 2], "rope_theta": 10000,
                "partial_rotary_factor": 1.0,
            },
        ),
        "paddleocr_vl": {
            "model_type": "paddleocr_vl", "architectures": ["PaddleOCRVLForConditionalGeneration"],
            **_TEXT, **_IDS, "hidden_size": 1024, "num_hidden_layers": 2, "head_dim": 16,
            "use_bias": False, "rope_scaling": {**_SECTIONS, "rope_type": "default"},
            "vision_config": {
                "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
                "num_attention_heads": 2, "num_channels": 3, "image_size": 24, "patch_size": 4,
                "spatial_merge_size": 2,
            },
        },
    }
)  # fmt: skip
"""One configuration of each type. PaddleOCR-VL's width is what mlx-vlm has it at, always."""
