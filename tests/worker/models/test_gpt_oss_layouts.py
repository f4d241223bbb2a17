"""gpt-oss as it is stored: in blocks as published, in numbers as transformers writes, by mlx-lm."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlxd_shared.domain.errors import InvalidModel
from mlxd_worker.models.loader import inspect_model
from tests.worker.hybrid import TOLERANCE, error, peer_logits, token_ids
from tests.worker.kin import (
    GPT_OSS,
    all_logits,
    build,
    kin_weights,
    quantise,
    write_kin,
    write_quantised,
)
from tests.worker.models.test_gpt_oss import MXFP4
from tests.worker.tiny import load, stored_in, write_model


def publish(folder: Path, config: Mapping[str, Any] = GPT_OSS) -> Path:
    """Write a model as published: experts in blocks, gates and ups row by row in turns."""
    weights = kin_weights(config)
    _, packed = quantise(config, weights, **MXFP4)
    stored = {name: array for name, array in weights.items() if ".experts." not in name}
    for index in range(config["num_hidden_layers"]):
        stem = f"model.layers.{index}.mlp.experts."

        def both(part: str, stem: str = stem) -> mx.array:
            gate, up = (packed[f"{stem}{name}_proj.{part}"] for name in ("gate", "up"))
            shape = (gate.shape[0], 2 * gate.shape[1], *gate.shape[2:])
            return mx.stack([gate, up], axis=2).reshape(shape)

        down = {part: packed[f"{stem}down_proj.{part}"] for part in ("weight", "scales", "bias")}
        stored |= {
            f"{stem}gate_up_proj_blocks": blocks(both("weight")),
            f"{stem}gate_up_proj_scales": both("scales"),
            f"{stem}gate_up_proj_bias": both("bias"),
            f"{stem}down_proj_blocks": blocks(down["weight"]),
            f"{stem}down_proj_scales": down["scales"],
            f"{stem}down_proj_bias": down["bias"],
        }
    method = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    return write_model(folder, {**config, "quantization_config": method}, stored)


def blocks(words: mx.array) -> mx.array:
    """Return words as bytes, 16 a group."""
    return words.view(mx.uint8).reshape(*words.shape[:-1], -1, 16)


def in_numbers(folder: Path, config: Mapping[str, Any] = GPT_OSS) -> Path:
    """Write a model as transformers does: outputs last, gates and ups in turns."""
    stored = kin_weights(config)
    for index in range(config["num_hidden_layers"]):
        stem = f"model.layers.{index}.mlp.experts."
        gate, up, down = (stored.pop(f"{stem}{n}_proj.weight") for n in ("gate", "up", "down"))
        turns = mx.stack([gate, up], axis=2).reshape(gate.shape[0], -1, gate.shape[2])
        biases = [stored.pop(f"{stem}{name}_proj.bias") for name in ("gate", "up", "down")]
        stored |= {
            f"{stem}gate_up_proj": mx.contiguous(turns.swapaxes(1, 2)),
            f"{stem}gate_up_proj_bias": mx.stack(biases[:2], axis=2).reshape(gate.shape[0], -1),
            f"{stem}down_proj": mx.contiguous(down.swapaxes(1, 2)),
            f"{stem}down_proj_bias": biases[2],
        }
    return write_model(folder, config, stored)


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "unpacked"])
def test_the_published_layout_equals_the_peers(tmp_path: Path, *, packed: bool) -> None:
    """Blocks and scales as published, beside numbers, give what mlx-lm makes of them."""
    folder = publish(tmp_path)
    tokens = token_ids(90, seed=2)
    model = build(folder, packed=packed)

    assert error(all_logits(model, tokens), peer_logits(folder, tokens)) < TOLERANCE
    assert any(array.dtype == mx.uint32 for array in model.parameters().values()) is packed


def test_all_layouts_are_one_model(tmp_path: Path) -> None:
    """Stored apart, in turns by rows or in turns by columns, the arrays held are the same."""
    plain = load(write_kin(tmp_path / "a", GPT_OSS)).parameters()
    turned = load(in_numbers(tmp_path / "b")).parameters()
    by_peer = build(write_quantised(tmp_path / "c", GPT_OSS, **MXFP4), packed=True).parameters()
    blocked = build(publish(tmp_path / "d"), packed=True).parameters()

    assert plain.keys() == turned.keys()
    assert all(mx.array_equal(array, turned[name]) for name, array in plain.items())
    experts = [name for name in by_peer if ".expert_" in name]
    assert len(experts) == 6 * GPT_OSS["num_hidden_layers"]
    assert all(mx.array_equal(by_peer[name], blocked[name]) for name in experts)


@pytest.mark.parametrize("part", ["gate_up_proj_scales", "down_proj_blocks"])
def test_a_missing_part_of_the_published_layout_is_named(part: str, tmp_path: Path) -> None:
    """What is made of several tensors needs them all, by the names they are stored under."""
    folder = publish(tmp_path)
    stored = stored_in(folder)
    missing = f"model.layers.1.mlp.experts.{part}"
    del stored[missing]
    mx.save_safetensors(str(folder / "model.safetensors"), stored)

    with pytest.raises(InvalidModel, match="missing tensors") as caught:
        inspect_model(folder)

    assert caught.value.field == missing


def test_the_published_layouts_shapes_are_checked(tmp_path: Path) -> None:
    """Blocks of another shape are refused by the name that they are stored under."""
    folder = publish(tmp_path)
    stored = stored_in(folder)
    name = "model.layers.2.mlp.experts.gate_up_proj_blocks"
    stored[name] = stored[name][:, :-1]
    mx.save_safetensors(str(folder / "model.safetensors"), stored)

    with pytest.raises(InvalidModel) as caught:
        inspect_model(folder)

    assert caught.value.field == name
