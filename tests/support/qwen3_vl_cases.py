"""Qwen3-VLs and Qwen3.5s that see, whose logits a reference has written down."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from tests.support.qwen_vl_cases import PLACE, Case
from tests.support.random_model import TINY, decoder_config
from tests.support.seeing_shapes import MERGE, PATCH

GOLDEN: Final = Path(__file__).parents[1] / "data" / "models" / "qwen3_vl_logits.json"
"""Written by `python -m tests.support.qwen3_vl_reference`."""
DENSE, SPARSE = "Qwen3VLForConditionalGeneration", "Qwen3VLMoeForConditionalGeneration"
HYBRID, HYBRID_SPARSE = "Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration"
TYPES: Final[Mapping[str, str]] = MappingProxyType(
    {DENSE: "qwen3_vl", SPARSE: "qwen3_vl_moe", HYBRID: "qwen3_5", HYBRID_SPARSE: "qwen3_5_moe"}
)
HEAD_DIM: Final = 16
TOWER: Final[Mapping[str, Any]] = MappingProxyType(
    {
        "depth": 3, "hidden_size": 16, "intermediate_size": 40, "num_heads": 2,
        "hidden_act": "gelu_pytorch_tanh", "in_channels": 3, "patch_size": PATCH,
        "spatial_merge_size": MERGE, "temporal_patch_size": 2, "out_hidden_size": 32,
        "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 2],
    }
)  # fmt: skip
_ROPE: Final = {"rope_type": "default", "rope_theta": 10000.0, "mrope_interleaved": True}
_EXPERTS: Final = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_OWN: Final[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
    {
        DENSE: {"rope_parameters": {**_ROPE, "mrope_section": [4, 2, 2]}},
        SPARSE: {"rope_parameters": {**_ROPE, "mrope_section": [4, 2, 2]}, **_EXPERTS},
        HYBRID: {
            "rope_parameters": {
                **_ROPE, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5,
            },
            "full_attention_interval": 2, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
            "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_conv_kernel_dim": 4,
        },
    }
)  # fmt: skip


def stacked_config(
    architecture: str = DENSE,
    *,
    token_id: int = PLACE,
    vision: Mapping[str, Any] | None = None,
    **text: Any,
) -> dict[str, Any]:
    """Return the config.json of a tiny model; vision, text: keys of either that are otherwise."""
    sparse = architecture in (SPARSE, HYBRID_SPARSE)
    hybrid = architecture in (HYBRID, HYBRID_SPARSE)
    own = {**_OWN[HYBRID if hybrid else architecture]}
    if hybrid and sparse:
        own |= {**_EXPERTS, "shared_expert_intermediate_size": 24}
    inner = decoder_config(
        architecture, TINY, **{"head_dim": HEAD_DIM, "tie_word_embeddings": False, **own, **text}
    )
    for key in ("architectures", "bos_token_id", "eos_token_id", "rope_theta"):
        del inner[key]
    kind = TYPES[architecture]
    tower = {**TOWER, **({"deepstack_visual_indexes": []} if hybrid else {}), **(vision or {})}
    return {
        "architectures": [architecture],
        "model_type": kind,
        "text_config": {**inner, "model_type": f"{kind}_text"},
        "vision_config": {**tower, "model_type": f"{kind}_vision" if not hybrid else kind},
        "image_token_id": token_id,
        "tie_word_embeddings": inner["tie_word_embeddings"],
    }


@dataclass(frozen=True, slots=True)
class StackedCase(Case):
    """One configuration."""

    architecture: str = DENSE

    @property
    def config(self) -> dict[str, Any]:
        """Its config.json."""
        return stacked_config(self.architecture, vision=self.vision, **self.text)


def _sections(*counts: int, **more: Any) -> dict[str, Any]:
    """Return a change of the rotary part."""
    return {"rope_parameters": {**_ROPE, "mrope_section": list(counts), **more}}


_YARN: Final = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}

CASES: Final = (
    StackedCase("deep"),
    StackedCase("flat", vision={"deepstack_visual_indexes": []}),
    StackedCase("deep-in-all", vision={"deepstack_visual_indexes": [0, 1, 2]}),
    StackedCase("merge-one", vision={"spatial_merge_size": 1}),
    StackedCase("one-frame", vision={"temporal_patch_size": 1}),
    StackedCase("wide-table", vision={"num_position_embeddings": 144}),
    StackedCase("sections", text=_sections(4, 3, 1)),
    StackedCase("yarn", text=_sections(4, 2, 2, **_YARN)),
    StackedCase("tied", text={"tie_word_embeddings": True}),
    StackedCase("experts", architecture=SPARSE),
    StackedCase(
        "some-experts", architecture=SPARSE, vision={"deepstack_visual_indexes": [1]},
        text={"decoder_sparse_step": 2},
    ),
    StackedCase("hybrid", architecture=HYBRID),
    StackedCase(
        "hybrid-sections", architecture=HYBRID,
        text=_sections(3, 1, 2, partial_rotary_factor=0.75),
    ),
    StackedCase(
        "hybrid-merge-one", architecture=HYBRID,
        vision={"spatial_merge_size": 1}, text=_sections(3, 3, 2, partial_rotary_factor=1.0),
    ),
    StackedCase("hybrid-experts", architecture=HYBRID_SPARSE),
)  # fmt: skip
