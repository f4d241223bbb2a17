"""Llama's kin in engines: prompts in chunks, streams beside each other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.engines import tiny_engine
from tests.support.random_model import (
    TINY,
    decoder_config,
    expert_hybrid_config,
    hybrid_config,
    latent_config,
    write_random_model,
)
from tests.worker.hybrid import token_ids

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
    "deepseek v3": latent_config(TINY),
    "glm": latent_config(
        TINY, architectures=["Glm4MoeLiteForCausalLM"], n_group=1, topk_group=1,
    ),
    "qwen3-next": expert_hybrid_config(TINY),
}  # fmt: skip

NEW_MEMORIES = ["deepseek v3", "glm", "qwen3-next"]
KEPT = {**{name: CONFIGS[name] for name in NEW_MEMORIES}, "qwen3.5": hybrid_config(TINY)}


@pytest.mark.parametrize("name", CONFIGS)
def test_text_does_not_depend_on_the_chunks(name: str, tmp_path: Path) -> None:
    """Greedy text past every window is the same however the prompt was cut."""
    folder = write_random_model(tmp_path, CONFIGS[name])
    prompt = [3 + index % 300 for index in range(0, 700, 7)]

    texts = [tiny_engine(folder, chunk=chunk).alone(prompt, max_tokens=40).ids for chunk in (7, 64)]

    assert texts[0] == texts[1]
    assert len(texts[0]) == 40


@pytest.mark.parametrize("name", NEW_MEMORIES)
def test_streams_beside_each_other_say_what_each_says_alone(name: str, tmp_path: Path) -> None:
    """Prompts of several lengths, decoded together, give each what an engine of its own gives."""
    folder = write_random_model(tmp_path, CONFIGS[name])
    prompts = [token_ids(length, seed=length, vocab=200) for length in (150, 31, 90)]
    engine = tiny_engine(folder)
    sinks = [engine.submit(prompt, max_tokens=40)[1] for prompt in prompts]

    engine.run()

    alone = [tiny_engine(folder).alone(prompt, max_tokens=40).ids for prompt in prompts]
    assert [sink.ids for sink in sinks] == alone


@pytest.mark.parametrize("name", KEPT)
def test_a_kept_prefix_does_not_change_what_is_said(name: str, tmp_path: Path) -> None:
    """A conversation's later turns, resumed from what was kept, say what they say from nothing."""
    folder = write_random_model(tmp_path, KEPT[name])
    engine = tiny_engine(folder, prefix_nbytes=64 << 20)
    text = token_ids(100, seed=1, vocab=200)
    reused = []
    for turn in range(3):
        sink = engine.alone(text, max_tokens=20)
        assert sink.ids == tiny_engine(folder).alone(text, max_tokens=20).ids
        reused.append(sink.finished.usage.cached_tokens)
        text = [*text, *sink.ids, *token_ids(15, seed=turn, vocab=200)]

    assert reused[0] == 0
    assert all(tokens > 0 for tokens in reused[1:])
