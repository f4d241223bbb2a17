"""Llama's kin in engines: prompts in chunks, streams beside each other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.engines import tiny_engine
from tests.support.random_model import TINY, decoder_config, write_random_model

CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3": decoder_config("Qwen3ForCausalLM", TINY, head_dim=16),
    "experts": decoder_config(
        "Qwen3MoeForCausalLM", TINY, head_dim=16, num_experts=8, num_experts_per_tok=2,
        moe_intermediate_size=16, norm_topk_prob=True, mlp_only_layers=[1],
    ),
    "gemma 3": decoder_config(
        "Gemma3ForCausalLM", TINY, head_dim=16, sliding_window=24, sliding_window_pattern=2,
        query_pre_attn_scalar=16,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_text_does_not_depend_on_the_chunks(name: str, tmp_path: Path) -> None:
    """Greedy text past every window is the same however the prompt was cut."""
    folder = write_random_model(tmp_path, CONFIGS[name])
    prompt = [3 + index % 300 for index in range(0, 700, 7)]

    texts = [tiny_engine(folder, chunk=chunk).alone(prompt, max_tokens=40).ids for chunk in (7, 64)]

    assert texts[0] == texts[1]
    assert len(texts[0]) == 40
