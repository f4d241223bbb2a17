"""What is said of a small model of every family before it is loaded: a table that is committed.

`python -m tests.support.described` writes it anew; a change of it is a change of what plans reckon.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from mlxd_controller.store.folder import read_folder
from mlxd_models.describe import Description, describe
from mlxd_models.families.registry import REGISTRY
from mlxd_models.fit.planner import plan_load
from mlxd_shared.domain.requests import LoadSpec, Weights
from tests.support.made_weights import write_weights
from tests.support.model_facts import device

TABLE: Final = Path(__file__).parents[1] / "data" / "described.json"
CONTEXT, ROWS = 512, 2
STORED: Final = ("float32", "4-bit")

SIZES: Final[Mapping[str, Any]] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 320,
    "max_position_embeddings": 1024,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
EXPERTS: Final[Mapping[str, Any]] = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
}
SHARED: Final[Mapping[str, Any]] = {**EXPERTS, "shared_expert_intermediate_size": 64}
HYBRID: Final[Mapping[str, Any]] = {
    "partial_rotary_factor": 0.25,
    "full_attention_interval": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
}
LATENT: Final[Mapping[str, Any]] = {
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
OWN: Final[Mapping[str, Mapping[str, Any]]] = {
    "DeepseekV2ForCausalLM": {
        **LATENT, "q_lora_rank": None, "topk_method": "greedy", "scoring_func": "softmax",
        "norm_topk_prob": False,
    },
    "DeepseekV3ForCausalLM": LATENT,
    "Gemma3ForCausalLM": {"sliding_window": 128, "sliding_window_pattern": 2},
    "Gemma3ForConditionalGeneration": {"sliding_window": 128},
    "Glm4MoeLiteForCausalLM": LATENT,
    "GptOssForCausalLM": {
        "sliding_window": 128, "num_local_experts": 6, "num_experts_per_tok": 2,
        "rope_scaling": {"rope_type": "default"},
    },
    "LlamaForCausalLM": {},
    "MistralForCausalLM": {"sliding_window": 128},
    "Qwen2ForCausalLM": {},
    "Qwen3ForCausalLM": {},
    "Qwen3MoeForCausalLM": EXPERTS,
    "Qwen3NextForCausalLM": {**HYBRID, **SHARED},
    "Qwen3_5ForCausalLM": HYBRID,
    "Qwen3_5MoeForCausalLM": {**HYBRID, **SHARED},
}  # fmt: skip
"""What each family's config has besides, or otherwise."""


def config_of(architecture: str) -> dict[str, Any]:
    """Return a family's config of a few thousand values."""
    own = {**SIZES, **OWN[architecture]}
    if architecture == "Gemma3ForConditionalGeneration":
        own = {"text_config": own, "tie_word_embeddings": False}
    return {"architectures": [architecture], **own}


def write_described(folder: Path, architecture: str, stored: str) -> Path:
    """Write the model of a row; return its folder."""
    return write_weights(folder, config_of(architecture), stored=stored)


def said_of(folder: Path) -> dict[str, Any]:
    """Return what is said of a model: tensors, sizes, and the bytes of plans by form and term."""
    described, facts = describe(folder), read_folder(folder).facts
    plans = {
        weights.value: plan_load(
            facts, LoadSpec(CONTEXT, ROWS, weights, prefix_cache_nbytes=0), device(1 << 10)
        )
        for weights in (Weights.STORED, Weights.FLOAT32)
    }
    terms = ("weights", "kv", "activations")
    return {
        "tensors": _tensors(described),
        "values": described.weight_values,
        "stored_bytes": facts.stored_bytes,
        "context_max": facts.context_length_max,
        "caches": json.loads(json.dumps(asdict(facts.caches))),
        "passes": asdict(facts.passes),
        "plans": {
            form: {term.name: term.nbytes for term in plan.terms if term.name in terms}
            for form, plan in plans.items()
        },
    }


def _tensors(described: Description) -> dict[str, int]:
    """Return how many tensors there are, and how many of them are made with others at once."""
    required = [spec for spec in described.specs if spec.required]
    return {"stored": len(described.facts), "joined": sum(bool(spec.joins) for spec in required)}


def table() -> dict[str, dict[str, Any]]:
    """Return the table as it is committed."""
    rows: dict[str, dict[str, Any]] = json.loads(TABLE.read_text(encoding="utf-8"))
    return rows


def _make_table() -> dict[str, dict[str, Any]]:
    with tempfile.TemporaryDirectory() as root:
        return {
            name: {
                stored: said_of(write_described(Path(root) / name / stored, name, stored))
                for stored in STORED
            }
            for name in sorted(REGISTRY.entries)
        }


if __name__ == "__main__":
    TABLE.write_text(json.dumps(_make_table(), indent=1) + "\n", encoding="utf-8")
