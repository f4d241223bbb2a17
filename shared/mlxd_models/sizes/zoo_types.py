"""Which models mlx-lm has a module for, by config.json alone.

A name that is imported is one of `ZOO_TYPES`: nothing else in a config leads to code.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

ZOO_EXTRA: Final = "zoo"
"""What `pip install mlxd[...]` takes for it."""

ZOO_VERSION: Final = "0.32.2"
"""The one version of mlx-lm that the adapter was held to; its caches change from one to another."""

ZOO_TYPES: Final = frozenset(
    """
    Klear afm7 afmoe apertus baichuan_m1 bailing_hybrid bailing_moe bailing_moe_linear
    bailing_moe_v3 bitnet cohere cohere2 dbrx deepseek deepseek_v2 deepseek_v3 deepseek_v32
    deepseek_v41 dots1 ernie4_5 ernie4_5_moe exaone exaone4 exaone_moe falcon_h1 gear gemma gemma2
    gemma3 gemma3_text gemma3n gemma4 gemma4_text glm glm4 glm4_moe glm4_moe_lite glm_moe_dsa gpt2
    gpt_bigcode gpt_neox gpt_oss gptj granite granitemoe granitemoehybrid helium hunyuan
    hunyuan_v1_dense internlm2 internlm3 iquestloopcoder jamba kimi_k25 kimi_k3 kimi_linear kimi_vl
    laguna lfm2-vl lfm2 lfm2_moe lille-130m llama llama4 llama4_text longcat_flash
    longcat_flash_ngram mamba mamba2 mellum mimo mimo_v2_flash minicpm minicpm3 minimax
    minimax_m3_vl ministral3 mistral3 mistral4 mixtral muse_glimmer muse_spark nanbeige nanochat
    nemotron-nas nemotron nemotron_h olmo olmo2 olmo3 olmo_hybrid olmoe openelm phi phi3 phi3small
    phimoe phixtral pixtral plamo plamo2 plamo3 prism_hadamard_qwen35 qwen qwen2 qwen2_moe qwen2_vl
    qwen3 qwen3_5 qwen3_5_moe qwen3_moe qwen3_next qwen3_vl qwen3_vl_moe recurrent_gemma rwkv7
    seed_oss smollm3 solar_open spark2_5 stablelm starcoder2 step3p5 talkie telechat3 youtu_llm
    """.split()  # noqa: SIM905 - a table of names is read better so
)
"""mlx-lm's modules of models."""

_ALIASES: Final[Mapping[str, str]] = {
    "deepseek_v41_text": "deepseek_v41",
    "falcon_mamba": "mamba",
    "gemma4_unified": "gemma4",
    "iquestcoder": "llama",
    "joyai_llm_flash": "deepseek_v3",
    "kimi_k2": "deepseek_v3",
    "llava": "mistral3",
    "minimax_m2": "minimax",
    "mistral": "llama",
    "phi-msft": "phixtral",
    "qwen2_5_vl": "qwen2_vl",
    "xverse": "llama",
}
"""Types that are served by another type's module."""

_BY_ARCHITECTURE: Final[Mapping[tuple[str, str], str]] = {
    ("bailing_hybrid", "BailingMoeV3ForCausalLM"): "bailing_moe_v3"
}


def zoo_type(config: Mapping[str, Any]) -> str | None:
    """Return which of `ZOO_TYPES` a config is of; None where mlx-lm has none for it."""
    stated = config.get("model_type")
    if not isinstance(stated, str):
        return None
    names = config.get("architectures")
    for name in names if isinstance(names, list) else ():
        zoo = _BY_ARCHITECTURE.get((stated, name)) if isinstance(name, str) else None
        if zoo is not None:
            return zoo
    module = _ALIASES.get(stated, stated)
    return module if module in ZOO_TYPES else None
