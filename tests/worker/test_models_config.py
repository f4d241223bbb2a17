"""config.json: each way in which it can be wrong is an error that names the key."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from mlxd_shared.errors import InvalidModel
from mlxd_worker.models.config import architecture_of, parse_llama, parse_mistral, read_config
from mlxd_worker.models.qwen2 import parse_qwen2
from mlxd_worker.models.registry import REGISTRY, DuplicateArchitecture, Registry
from mlxd_worker.models.rope import Llama3Scaling, RopeConfig
from tests.real_inputs import real_input
from tests.worker.tiny import config_with, write_config

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}

BREACHES: dict[str, tuple[dict[str, Any], str, str]] = {
    "no hidden size": ({"hidden_size": None}, "hidden_size", "missing"),
    "size as text": ({"hidden_size": "32"}, "hidden_size", "not an integer"),
    "size as boolean": ({"hidden_size": True}, "hidden_size", "not an integer"),
    "size as fraction": ({"hidden_size": 32.0}, "hidden_size", "not an integer"),
    "no layers": ({"num_hidden_layers": 0}, "num_hidden_layers", "not in 1.."),
    "too many layers": ({"num_hidden_layers": 1 << 30}, "num_hidden_layers", "not in 1.."),
    "no vocabulary": ({"vocab_size": None}, "vocab_size", "missing"),
    "no context": (
        {"max_position_embeddings": None}, "max_position_embeddings", "missing",
    ),
    "negative context": (
        {"max_position_embeddings": -1}, "max_position_embeddings", "not in 8..",
    ),
    "more key heads than heads": (
        {"num_key_value_heads": 8}, "num_key_value_heads", "not in 1..4",
    ),
    "heads not divided": (
        {"num_key_value_heads": 3}, "num_key_value_heads", "does not divide 4",
    ),
    "no head size": ({"num_attention_heads": 3, "num_key_value_heads": 3}, "head_dim", "missing"),
    "odd head size": ({"head_dim": 7}, "head_dim", "odd"),
    "epsilon not finite": ({"rms_norm_eps": math.nan}, "rms_norm_eps", "not a finite number"),
    "epsilon zero": ({"rms_norm_eps": 0}, "rms_norm_eps", "not a finite number"),
    "theta beyond floats": ({"rope_theta": 10**400}, "rope_theta", "not a finite number"),
    "theta as text": ({"rope_theta": "1e4"}, "rope_theta", "not a number"),
    "other activation": ({"hidden_act": "gelu"}, "hidden_act", "'gelu'"),
    "tie as number": ({"tie_word_embeddings": 1}, "tie_word_embeddings", "not true or false"),
    "bias as text": ({"attention_bias": "no"}, "attention_bias", "not true or false"),
    "groups unsaid": ({"quantization": {"bits": 4}}, "quantization.group_size", "missing"),
    "odd groups": (
        {"quantization": {"bits": 4, "group_size": 48}}, "quantization.group_size", "none of 32",
    ),
    "odd bits": (
        {"quantization": {"bits": 7, "group_size": 64}}, "quantization.bits", "none of 2, 3, 4",
    ),
    "other packing": (
        {"quantization": {"bits": 4, "group_size": 32, "mode": "mxfp4"}},
        "quantization.mode", "'mxfp4'",
    ),
    "one tensor's own packing": (
        {"quantization": {"bits": 4, "group_size": 64, "lm_head": {"bits": 8, "group_size": 64}}},
        "quantization.lm_head", "not supported",
    ),
    "packing as text": ({"quantization": "4bit"}, "quantization", "not an object"),
    "two packings": (
        {"quantization": {"bits": 4, "group_size": 64}, "quantization_config": {"bits": 8}},
        "quantization_config", "contradicts",
    ),
    "quantised elsewhere": (
        {"quantization_config": {"quant_method": "fp8"}}, "quantization_config", "not supported",
    ),
    "partly rotary": ({"partial_rotary_factor": 0.5}, "partial_rotary_factor", "0.5"),
    "rope interleaved": ({"rope_interleaved": True}, "rope_interleaved", "not supported"),
    "sliding layers": (
        {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types", "sliding",
    ),
    "unknown layers": ({"layer_types": ["full_attention", "conv"]}, "layer_types", "'conv'"),
    "layers not listed": ({"layer_types": "full_attention"}, "layer_types", "not a list"),
    "too few layers": ({"layer_types": ["full_attention"]}, "layer_types", "names 1 layers of 2"),
    "rope as list": ({"rope_scaling": []}, "rope_scaling", "not an object"),
    "rope without kind": ({"rope_scaling": {"factor": 2.0}}, "rope_scaling", "no rope_type"),
    "yarn": ({"rope_scaling": {"rope_type": "yarn"}}, "rope_scaling.rope_type", "'yarn'"),
    "dynamic": (
        {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_scaling.type", "'dynamic'",
    ),
    "rope kind not a word": ({"rope_scaling": {"type": 3}}, "rope_scaling.type", "3"),
    "linear without factor": (
        {"rope_scaling": {"type": "linear"}}, "rope_scaling.factor", "missing",
    ),
    "llama3 without factors": (
        {"rope_scaling": {"rope_type": "llama3", "factor": 8}},
        "rope_scaling.low_freq_factor", "missing",
    ),
    "llama3 factors crossed": (
        {"rope_scaling": {**LLAMA3, "high_freq_factor": 1.0}},
        "rope_scaling.high_freq_factor", "not above",
    ),
    "newer spelling": (
        {"rope_parameters": {"rope_type": "longrope"}}, "rope_parameters.rope_type", "'longrope'",
    ),
    "two spellings that differ": (
        {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": LLAMA3},
        "rope_scaling", "contradicts",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BREACHES)
def test_a_wrong_key_is_named(name: str) -> None:
    """A missing, mistyped, out-of-range or unsupported key is refused by its own name."""
    changes, field, words = BREACHES[name]

    with pytest.raises(InvalidModel) as caught:
        parse_llama(config_with(**changes))

    assert (caught.value.file, caught.value.field) == ("config.json", field)
    assert words in caught.value.problem


def test_defaults_follow_the_family() -> None:
    """What a config leaves out has the family's meaning."""
    config = parse_llama(config_with(num_key_value_heads=None, rope_theta=None, head_dim=None))

    assert (config.kv_heads, config.head_dim, config.tied_head) == (4, 8, False)
    assert config.rope == RopeConfig(base=10000.0)


SLIDING, FULL = "sliding_attention", "full_attention"
FAMILIES = {"mistral": parse_mistral, "qwen2": parse_qwen2}
WINDOWS: dict[str, tuple[str, dict[str, Any], tuple[int | None, int | None]]] = {
    "mistral without": ("mistral", {}, (None, None)),
    "mistral": ("mistral", {"sliding_window": 1023}, (1023, 1023)),
    "mistral as long as the context": ("mistral", {"sliding_window": 1024}, (None, None)),
    "mistral mixed": (
        "mistral", {"sliding_window": 8, "layer_types": [FULL, SLIDING]}, (None, 8),
    ),
    "mistral whole": ("mistral", {"layer_types": [FULL, FULL]}, (None, None)),
    "mistral whole as the window is long": (
        "mistral", {"layer_types": [FULL, FULL], "sliding_window": 4096}, (None, None),
    ),
    "qwen2 without": ("qwen2", {}, (None, None)),
    "qwen2 not used": (
        "qwen2",
        {"use_sliding_window": False, "sliding_window": 8, "max_window_layers": 0},
        (None, None),
    ),
    "qwen2 later layers": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
        (None, 8),
    ),
    "qwen2 all layers": (
        "qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}, (8, 8),
    ),
    "qwen2 by default none of the first 28": (
        "qwen2", {"use_sliding_window": True, "sliding_window": 8}, (None, None),
    ),
    "qwen2 named": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 8, "layer_types": [SLIDING, FULL]},
        (8, None),
    ),
    "qwen2 default window": (
        "qwen2",
        {"use_sliding_window": True, "max_window_layers": 1, "max_position_embeddings": 8192},
        (None, 4096),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WINDOWS)
def test_each_layer_gets_its_window(name: str) -> None:
    """Which layers slide is the family's rule or the list; a window that cannot act is none."""
    family, changes, windows = WINDOWS[name]

    assert FAMILIES[family](config_with(**changes)).windows == windows


REFUSED_WINDOWS: dict[str, tuple[str, dict[str, Any], str, str]] = {
    "mistral named, no window": (
        "mistral", {"layer_types": [SLIDING, FULL]}, "sliding_window", "missing",
    ),
    "mistral window, none named": (
        "mistral", {"layer_types": [FULL, FULL], "sliding_window": 8}, "layer_types", "names no",
    ),
    "mistral window of nothing": ("mistral", {"sliding_window": 0}, "sliding_window", "not in 1.."),
    "mistral window as text": ("mistral", {"sliding_window": "8"}, "sliding_window", "integer"),
    "qwen2 named, not used": (
        "qwen2", {"layer_types": [SLIDING, FULL], "sliding_window": 8}, "layer_types",
        "use_sliding_window is not true",
    ),
    "qwen2 use as number": ("qwen2", {"use_sliding_window": 1}, "use_sliding_window", "true or"),
    "qwen2 whole layers": (
        "qwen2", {"max_window_layers": -1}, "max_window_layers", "not in 0..",
    ),
    "qwen2 without biases": ("qwen2", {"attention_bias": False}, "attention_bias", "false"),
    "qwen2 of pictures": ("qwen2", {"use_mrope": True}, "use_mrope", "not supported"),
    "qwen2 rotating in three": (
        "qwen2", {"rope_scaling": {"type": "mrope"}}, "rope_scaling.type", "'mrope'",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED_WINDOWS)
def test_a_window_that_leaves_a_doubt_is_refused(name: str) -> None:
    """Keys of a window that are wrong or contradict each other are refused by name."""
    family, changes, field, words = REFUSED_WINDOWS[name]

    with pytest.raises(InvalidModel) as caught:
        FAMILIES[family](config_with(**changes))

    assert caught.value.field == field
    assert words in caught.value.problem


def test_qwen2_has_biases_before_attention_only() -> None:
    """A Qwen2 adds biases to queries, keys and values whatever its config says, and to no more."""
    config = parse_qwen2(config_with(attention_bias=None))

    assert (config.qkv_bias, config.output_bias, config.mlp_bias) == (True, False, False)


def test_llama3_stretches_slow_rotations_only() -> None:
    """Short waves stay, long waves slow by the factor, and between them the blend is monotone."""
    scaling = Llama3Scaling(
        factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context=8192
    )
    waves = [10.0, 2048.0, 3000.0, 5000.0, 8192.0, 100000.0]

    stretches = [scaling.stretch(wave) for wave in waves]

    assert (stretches[0], stretches[1], stretches[-2], stretches[-1]) == (1.0, 1.0, 8.0, 8.0)
    assert stretches == sorted(stretches)


FILES: dict[str, tuple[bytes | None, str]] = {
    "missing": (None, "missing"),
    "empty": (b"", "not JSON"),
    "not JSON": (b"{", "not JSON"),
    "not UTF-8": (b'{"a": "\xff"}', "not JSON"),
    "not an object": (b"[]", "not a JSON object"),
    "too deep": (b"[" * 200_000, "not JSON"),
    "too long": (b" " * (16 * 2**20 + 1), "bytes long"),
}


@pytest.mark.parametrize("name", FILES)
def test_a_broken_file_is_named(name: str, tmp_path: Path) -> None:
    """A config.json that is missing or no object is an error about that file."""
    content, words = FILES[name]
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)

    with pytest.raises(InvalidModel) as caught:
        read_config(tmp_path)

    assert caught.value.file == "config.json"
    assert words in caught.value.problem


@pytest.mark.parametrize("value", [None, [], "LlamaForCausalLM", [3], {}])
def test_a_config_without_architecture_is_refused(value: object) -> None:
    """`architectures` must be a list that starts with a name."""
    with pytest.raises(InvalidModel, match=r"config\.json: architectures"):
        architecture_of({"architectures": value})


def test_an_unknown_architecture_lists_the_known() -> None:
    """Asking for an architecture that nobody wrote names it and what there is."""
    with pytest.raises(InvalidModel) as caught:
        REGISTRY.find("MambaForCausalLM")

    assert caught.value.field == "architectures"
    assert "'MambaForCausalLM'" in caught.value.problem
    assert "LlamaForCausalLM, MistralForCausalLM" in caught.value.problem


def test_an_architecture_is_registered_once() -> None:
    """A second registration of a name is a loud bug, and changes nothing."""
    llama = REGISTRY.find("LlamaForCausalLM")
    mistral = REGISTRY.find("MistralForCausalLM")
    registry = Registry(("Mine", llama))

    with pytest.raises(DuplicateArchitecture, match="Mine is registered twice"):
        registry.register("Mine", mistral)

    assert registry.find("Mine") is llama
    assert set(registry.entries) == {"Mine"}


def test_real_configs_parse_or_name_their_key() -> None:
    """Of the real configs, those of the family parse and all others are refused by a name."""
    parsed = {}
    refused = {}
    for folder in sorted(real_input("configs", "hf").iterdir()):
        try:
            config = read_config(folder)
            parsed[folder.name] = REGISTRY.find(architecture_of(config)).parse(config)
        except InvalidModel as error:
            refused[folder.name] = error.field

    assert all(refused.values())
    assert parsed["HuggingFaceTB--SmolLM2-135M-Instruct"].tied_head
    assert parsed["meta-llama--Meta-Llama-3.1-8B"].rope.llama3.factor == 8.0
    assert parsed["meta-llama--Meta-Llama-3.1-8B"].context_max == 131072


def test_reading_is_not_rewriting(tmp_path: Path) -> None:
    """What was written is what is read."""
    write_config(tmp_path, config_with())

    assert read_config(tmp_path) == json.loads((tmp_path / "config.json").read_text())
