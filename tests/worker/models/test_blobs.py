"""Weights that lie in blobs: the same model as from a folder, whatever they are called there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import psutil
import pytest

from mlxd_models.sizes.weight_forms import FloatType
from mlxd_shared.domain.errors import InvalidModel
from mlxd_worker.models.base import Model
from mlxd_worker.models.loader import inspect_model, load_model
from tests.support.made_stores import JSON, TENSOR, OllamaStore
from tests.worker.models.test_packed import GROUP, logits, pack, packed_config
from tests.worker.tiny import config_with, difference, load, random_weights, write_model

FACTOR = 0.37
CLOSE = 1e-5
OPEN_FILES_MAX = 4
"""More than before a load, while it reads one file after the other."""


def blob(tensors: dict[str, mx.array], scratch: Path, metadata: dict[str, str]) -> bytes:
    """Return arrays as a safetensors file."""
    path = scratch / "blob.safetensors"
    mx.save_safetensors(str(path), tensors, metadata)
    return path.read_bytes()


def store_model(
    root: Path, config: dict[str, Any], blobs: list[dict[str, mx.array]], **metadata: str
) -> Path:
    """Write a store of one model, a blob for each of `blobs`, and return its manifest."""
    store = OllamaStore(root)
    layers = [store.layer(TENSOR, min(tensors), blob(tensors, root, metadata)) for tensors in blobs]
    layers.append(store.layer(JSON, "config.json", json.dumps(config).encode()))
    return store.manifest("m", layers)


def load_manifest(manifest: Path, *, packed: bool = False) -> Model:
    """Load the model of a manifest."""
    return load_model(
        inspect_model(manifest), form=FloatType.F32, progress=lambda *_: None, packed=packed
    )


def test_a_blob_a_tensor_is_the_folders_model(tmp_path: Path) -> None:
    """Logits are equal bit for bit, and no more than a few files are open at any time."""
    config = config_with(attention_bias=True)
    folder = write_model(tmp_path / "folder", config)
    weights = random_weights(config)
    manifest = store_model(tmp_path / "store", config, [{k: v} for k, v in weights.items()])
    process = psutil.Process()
    before, opened = process.num_fds(), [0]

    def progress(read_nbytes: int, total_nbytes: int) -> None:
        opened.append(process.num_fds() - before)

    model = load_model(inspect_model(manifest), form=FloatType.F32, progress=progress)
    assert difference(logits(model), logits(load(folder))) == 0.0
    assert max(opened) <= OPEN_FILES_MAX < len(weights)


@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_packed_blobs_are_the_packed_folders_model(
    packed: bool, backwards: bool, tmp_path: Path
) -> None:
    """Scales and offsets beside their weight or in blobs of their own, in any order; the config
    says nothing of packing, and biases stay biases."""
    config = packed_config(attention_bias=True)
    tensors = pack(config, random_weights(config))
    folder = write_model(tmp_path / "folder", config, tensors)
    bare = {key: value for key, value in config.items() if not key.startswith("quantization")}
    named = {}
    for name, array in tensors.items():
        stem, _, part = name.rpartition(".")
        mine = {"scales": f"{stem}.weight.scale", "biases": f"{stem}.weight.bias"}
        named[mine.get(part, name)] = array
    order = sorted(named, reverse=backwards)
    manifest = store_model(
        tmp_path / "store",
        bare,
        [{name: named[name]} for name in order],
        quant_type="int4",
        group_size=str(GROUP),
    )

    files = inspect_model(manifest)
    assert not [f.name for f in files.facts if f.name.endswith("weight_qbias")]
    other = load_model(
        inspect_model(folder), form=FloatType.F32, progress=lambda *_: None, packed=packed
    )
    assert difference(logits(load_manifest(manifest, packed=packed)), logits(other)) == 0.0


def test_a_tensor_stored_again_is_compared_by_the_load(tmp_path: Path) -> None:
    """The same bytes are one tensor; other bytes refuse the load and name the tensor."""
    config = config_with()
    weights = random_weights(config)
    norm = "model.norm.weight"
    rest = [{k: v} for k, v in weights.items() if k != norm]
    head = {"lm_head.weight": weights["lm_head.weight"]}
    twice = [{norm: weights[norm]}, {norm: weights[norm]} | head]
    same = store_model(tmp_path / "same", config, [*rest, *twice])
    folder = write_model(tmp_path / "folder", config)
    assert difference(logits(load_manifest(same)), logits(load(folder))) == 0.0

    changed = [{norm: weights[norm]}, {norm: weights[norm] + 1} | head]
    manifest = store_model(tmp_path / "other", config, [*rest, *changed])
    inspect_model(manifest)
    with pytest.raises(InvalidModel, match="other values") as caught:
        load_manifest(manifest)
    assert caught.value.field == norm


def test_a_second_scale_is_a_plain_factor(tmp_path: Path) -> None:
    """What stands beside small floats multiplies them; MLX's own second scale is another number."""
    config = config_with(hidden_size=32, intermediate_size=48)
    weights = random_weights(config)
    numbers, blobs = dict(weights), []
    for name, array in weights.items():
        if not name.endswith("_proj.weight"):
            blobs.append({name: array})
            continue
        words, scales, *_ = mx.quantize(array / FACTOR, group_size=16, bits=4, mode="nvfp4")
        numbers[name] = FACTOR * mx.dequantize(
            words, scales, group_size=16, bits=4, mode="nvfp4", dtype=mx.float32
        )
        blobs.append(
            {
                name: words,
                f"{name}.scale": scales,
                f"{name}.global_scale": mx.array(FACTOR, dtype=mx.float32),
            }
        )
    folder = write_model(tmp_path / "folder", config, numbers)
    manifest = store_model(tmp_path / "store", config, blobs, quant_type="nvfp4", group_size="16")

    for packed in (False, True):
        other = logits(load_manifest(manifest, packed=packed))
        assert difference(other, logits(load(folder))) < CLOSE
