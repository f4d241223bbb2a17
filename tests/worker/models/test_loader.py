"""Loading: all tensors or a name, in any form and layout, in bounded memory."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlxd_models.sizes.weight_forms import FloatType
from mlxd_shared.domain.errors import InvalidModel, LoadAbandoned
from mlxd_worker.models.loader import inspect_model, load_model
from tests.support.mlx_memory import live_nbytes
from tests.worker.hybrid_experts import NEXT, expert_weights
from tests.worker.latent import DEEPSEEK_V3, latent_weights
from tests.worker.tiny import (
    config_with,
    ignore_progress,
    load,
    random_weights,
    write_config,
    write_model,
    write_sharded,
)

Q0 = "model.layers.0.self_attn.q_proj.weight"
Weights = dict[str, mx.array]


def refusal(folder: Path) -> InvalidModel:
    """Return the error that inspecting `folder` raises."""
    with pytest.raises(InvalidModel) as caught:
        inspect_model(folder)
    return caught.value


def test_shards_and_one_file_give_one_model(tmp_path: Path) -> None:
    """However the tensors are spread over files, the weights in memory are the same."""
    config = config_with(attention_bias=True)
    single = load(write_model(tmp_path / "single", config)).parameters()
    sharded = load(write_sharded(tmp_path / "sharded", config, shards=3)).parameters()

    assert single.keys() == sharded.keys()
    assert all(mx.array_equal(single[name], sharded[name]).item() for name in single)


@pytest.mark.parametrize("stored", [mx.float32, mx.float16, mx.bfloat16])
@pytest.mark.parametrize("form", FloatType)
def test_every_form_from_every_stored_type(
    stored: mx.Dtype, form: FloatType, tmp_path: Path
) -> None:
    """Weights are converted exactly once, to the form that the plan asks for."""
    config = config_with()
    weights = {name: array.astype(stored) for name, array in random_weights(config).items()}
    files = inspect_model(write_model(tmp_path, config, weights))

    parameters = load_model(files, form=form, progress=ignore_progress).parameters()

    target = {"F32": mx.float32, "F16": mx.float16, "BF16": mx.bfloat16}[form]
    assert {array.dtype for array in parameters.values()} == {target}
    joined = mx.concatenate(
        [weights[f"model.layers.1.self_attn.{p}_proj.weight"].astype(target) for p in "qkv"]
    )
    assert mx.array_equal(parameters["layers.1.qkv.weight"], joined).item()


def drop(name: str) -> Callable[[Weights], None]:
    """Return a change that takes a tensor away."""

    def change(weights: Weights) -> None:
        del weights[name]

    return change


def put(name: str, array: mx.array) -> Callable[[Weights], None]:
    """Return a change that puts a tensor in."""
    return lambda weights: weights.update({name: array})


BREACHES: dict[str, tuple[Callable[[Weights], None], str, str]] = {
    "missing": (drop(Q0), Q0, f"missing tensors: {Q0}"),
    "missing head": (drop("lm_head.weight"), "lm_head.weight", "missing tensors"),
    "unexpected": (put("model.extra", mx.zeros(3)), "model.extra", "of no use to this config"),
    "unexpected bias": (
        put("model.layers.0.self_attn.q_proj.bias", mx.zeros(32)),
        "model.layers.0.self_attn.q_proj.bias", "of no use to this config",
    ),
    "a layer too many": (put("model.layers.2.input_layernorm.weight", mx.zeros(32)),
        "model.layers.2.input_layernorm.weight", "of no use"),
    "wrong shape": (put(Q0, mx.zeros((32, 16))), Q0, "shape [32, 16], the config says [32, 32]"),
    "transposed rank": (put(Q0, mx.zeros(1024)), Q0, "shape [1024]"),
    "wrong dtype": (put(Q0, mx.zeros((32, 32), dtype=mx.int32)), Q0, "dtype I32"),
}  # fmt: skip


@pytest.mark.parametrize("name", BREACHES)
def test_a_wrong_tensor_is_named(name: str, tmp_path: Path) -> None:
    """A missing, unexpected, misshapen or mistyped tensor is refused by its own name."""
    change, field, words = BREACHES[name]
    config = config_with()
    weights = random_weights(config)
    change(weights)

    error = refusal(write_model(tmp_path, config, weights))

    assert (error.file, error.field) == ("model.safetensors", field)
    assert words in error.problem


def test_a_list_of_names_is_bounded(tmp_path: Path) -> None:
    """Where everything is missing, the error names a few and counts the rest."""
    error = refusal(write_model(tmp_path, config_with(), {"nothing": mx.zeros(1)}))

    assert error.problem.endswith("and 16 more")


def test_a_tied_head_may_be_stored_if_it_is_equal(tmp_path: Path) -> None:
    """A stored copy of a tied head is no second array; one that differs is refused by name."""
    config = config_with(tie_word_embeddings=True)
    weights = random_weights(config)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"] * 1
    parameters = load(write_model(tmp_path / "same", config, weights)).parameters()
    assert "lm_head.weight" not in parameters
    weights["lm_head.weight"] = weights["lm_head.weight"] + 1e-6

    with pytest.raises(InvalidModel, match=r"lm_head.weight: differs from model.embed_tokens"):
        load(write_model(tmp_path / "other", config, weights))


def test_old_rotary_tables_are_known(tmp_path: Path) -> None:
    """The rotary table that old checkpoints store is consumed by name, in its right shape only."""
    config = config_with()
    weights = random_weights(config)
    table = "model.layers.0.self_attn.rotary_emb.inv_freq"
    weights[table] = mx.zeros(4)
    load(write_model(tmp_path / "good", config, weights))
    weights[table] = mx.zeros(5)

    assert refusal(write_model(tmp_path / "bad", config, weights)).field == table


def test_a_truncated_file_is_named(tmp_path: Path) -> None:
    """A download that broke off is noticed before any weight is read."""
    folder = write_model(tmp_path, config_with())
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])

    error = refusal(folder)

    assert error.file == "model.safetensors"
    assert "truncated" in error.problem


def test_a_file_that_shrinks_after_the_check_is_named(tmp_path: Path) -> None:
    """A file cut between check and load is an error about that file, not a crash."""
    folder = write_model(tmp_path, config_with())
    files = inspect_model(folder)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:2000])

    with pytest.raises(InvalidModel) as caught:
        load_model(files, form=FloatType.F32, progress=ignore_progress)

    assert caught.value.file == "model.safetensors"


def test_a_file_that_vanishes_after_the_check_is_named_without_its_folder(tmp_path: Path) -> None:
    """What a client is told names the file, never where it lay."""
    folder = write_model(tmp_path, config_with())
    files = inspect_model(folder)
    (folder / "model.safetensors").unlink()

    with pytest.raises(InvalidModel, match="missing") as caught:
        load_model(files, form=FloatType.F32, progress=ignore_progress)

    assert caught.value.file == "model.safetensors"
    assert str(tmp_path) not in caught.value.describe()


@pytest.mark.parametrize("gone", [True, False])
def test_a_file_that_is_another_after_the_check_is_named(gone: bool, tmp_path: Path) -> None:
    """A file written over between check and load, without a tensor or with another shape of it."""
    config = config_with()
    folder = write_model(tmp_path, config)
    files = inspect_model(folder)
    weights, norm = random_weights(config), "model.norm.weight"
    weights[norm] = mx.zeros(3)
    if gone:
        del weights[norm]
    write_model(tmp_path, config, weights)

    with pytest.raises(InvalidModel, match="has changed") as caught:
        load_model(files, form=FloatType.F32, progress=ignore_progress)

    assert (caught.value.file, caught.value.field) == ("model.safetensors", norm)


def test_a_file_that_shrinks_during_the_load_is_named(tmp_path: Path) -> None:
    """A file cut while its tensors are read is an error about the tensor that could not be."""
    folder = write_model(tmp_path, config_with())

    def cut(_read_nbytes: int, _total_nbytes: int) -> None:
        os.truncate(folder / "model.safetensors", 2000)

    with pytest.raises(InvalidModel, match="could not be read") as caught:
        load_model(inspect_model(folder), form=FloatType.F32, progress=cut)

    assert caught.value.file == "model.safetensors"
    assert caught.value.field


def test_no_weights_and_missing_shards_are_named(tmp_path: Path) -> None:
    """A folder without weights, and one whose index names what is not there, are refused."""
    write_config(tmp_path / "none", config_with())
    sharded = write_sharded(tmp_path / "sharded", config_with(), shards=2)
    (sharded / "model-00002-of-00002.safetensors").unlink()

    assert refusal(tmp_path / "none").file == "model.safetensors"
    assert "'model-00002-of-00002.safetensors' is missing" in refusal(sharded).problem


def test_an_unknown_architecture_is_refused_before_its_weights(tmp_path: Path) -> None:
    """The architecture is looked up before any weight file is touched."""
    write_config(tmp_path, config_with(architectures=["NobodysForCausalLM"]))

    assert refusal(tmp_path).field == "architectures"


def test_progress_rises_to_the_whole(tmp_path: Path) -> None:
    """Progress counts stored bytes, tensor by tensor, and ends at the sum of the headers."""
    files = inspect_model(write_model(tmp_path, config_with()))
    total_nbytes = sum(fact.nbytes for fact in files.facts)
    seen: list[tuple[int, int]] = []

    load_model(files, form=FloatType.BF16, progress=lambda *figures: seen.append(figures))

    read = [nbytes for nbytes, _ in seen]
    assert read == sorted(read)
    assert {total for _, total in seen} == {total_nbytes}
    assert read[-1] == total_nbytes
    assert len(seen) > 2 * files.config.layers


def test_a_load_can_be_given_up(tmp_path: Path) -> None:
    """What the progress callback raises ends the load, and its memory is given back."""
    files = inspect_model(write_model(tmp_path, config_with(vocab_size=5000)))
    before = live_nbytes()

    def give_up(read_nbytes: int, total_nbytes: int) -> None:
        if read_nbytes > total_nbytes // 2:
            raise LoadAbandoned("tiny")

    with pytest.raises(LoadAbandoned):
        load_model(files, form=FloatType.F32, progress=give_up)

    assert mx.get_active_memory() - before < 64 << 10


def test_the_peak_is_the_weights_and_one_tensor(tmp_path: Path) -> None:
    """Loading with conversion needs the finished weights plus the one tensor in the making."""
    config = config_with(hidden_size=256, intermediate_size=512, num_hidden_layers=6)
    weights = {name: array.astype(mx.bfloat16) for name, array in random_weights(config).items()}
    files = inspect_model(write_model(tmp_path, config, weights))
    del weights
    before = live_nbytes()

    model = load_model(files, form=FloatType.F32, progress=ignore_progress)

    finished = sum(array.nbytes for array in model.parameters().values())
    assert finished == 4 * files.weight_values
    assert abs(mx.get_active_memory() - before - finished) < 16 << 10
    # The largest product of the load: two parts as stored (2 bytes), as float32, and joined.
    largest_values = 2 * 512 * 256
    assert mx.get_peak_memory() - before <= finished + largest_values * (2 + 4) + (64 << 10)


def test_sizes_are_known_without_weights(tmp_path: Path) -> None:
    """The fit's sizes come from config and headers: values, stored form, keys a token."""
    config = config_with(tie_word_embeddings=True)
    weights = {name: array.astype(mx.float16) for name, array in random_weights(config).items()}
    files = inspect_model(write_model(tmp_path, config, weights))

    assert files.weight_values == sum(array.size for array in weights.values())
    assert files.stored is FloatType.F16
    assert files.footprint.caches.kv_values_per_token == 2 * 2 * 2 * 8
    assert files.footprint.context_max == 1024


def test_the_index_is_read_before_the_single_file(tmp_path: Path) -> None:
    """Where an index is present it decides, and a broken one is not skipped over."""
    folder = write_model(tmp_path, config_with())
    (folder / "model.safetensors.index.json").write_text(json.dumps({}), encoding="utf-8")

    assert refusal(folder).field == "weight_map"


WIDE: dict[str, dict[str, Any]] = {
    "latents": {
        **DEEPSEEK_V3, "kv_lora_rank": 512, "v_head_dim": 256, "qk_nope_head_dim": 256,
        "num_nextn_predict_layers": 1,
    },
    "hybrid": {
        **NEXT, "hidden_size": 256, "linear_value_head_dim": 128, "linear_key_head_dim": 128,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", WIDE)
def test_parts_that_are_put_in_order_take_no_more(name: str, tmp_path: Path) -> None:
    """A matrix that is taken apart by heads, or put in order by key heads, is there once as stored
    and twice as made, at most, beside the finished weights."""
    config = WIDE[name]
    tensors = latent_weights(config) if name == "latents" else expert_weights(config)
    weights = {stem: array.astype(mx.bfloat16) for stem, array in tensors.items()}
    files = inspect_model(write_model(tmp_path, config, weights))
    largest = max(
        array.size for stem, array in weights.items() if "kv_b" in stem or "in_proj" in stem
    )
    assert largest == max(array.size for array in weights.values())
    del weights, tensors
    before = live_nbytes()

    model = load_model(files, form=FloatType.F32, progress=ignore_progress)

    finished = sum(array.nbytes for array in model.parameters().values())
    assert abs(mx.get_active_memory() - before - finished) < 16 << 10
    assert mx.get_peak_memory() - before <= finished + largest * (2 + 4) + (64 << 10)
