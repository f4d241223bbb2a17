"""Gemma 3's text against mlx-lm: both kinds of layers, and each branch switched off."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlxd_models.families.common.decoder import Activation, DecoderConfig
from mlxd_models.families.gemma3 import round_to_bfloat16
from mlxd_shared.domain.errors import InvalidModel
from mlxd_worker.models.weights.fused import bounded_sum
from tests.real_inputs import real_input
from tests.worker.hybrid import TOLERANCE, error, peer_logits, token_ids
from tests.worker.kin import (
    GEMMA3,
    all_logits,
    build,
    change,
    kin_weights,
    parse_folder,
    quantise,
    worst_joined,
    worst_ragged,
    write_kin,
    write_quantised,
)
from tests.worker.tiny import load, stored_in, write_model

LINEAR = {"rope_type": "linear", "factor": 8.0}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": change(GEMMA3),
    "linear rope": change(GEMMA3, rope_scaling=LINEAR),
    "longer pattern": change(GEMMA3, sliding_window_pattern=3),
    "no sliding layer": change(GEMMA3, sliding_window_pattern=1, sliding_window=None),
    "own head": change(GEMMA3, tie_word_embeddings=False),
    "grouped": change(GEMMA3, num_key_value_heads=2),
    "window as long as the context": change(GEMMA3, sliding_window=1024),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_equal_the_peers(name: str, tmp_path: Path) -> None:
    """Whatever the variant and however the prompt is cut, logits are mlx-lm's."""
    folder = write_kin(tmp_path, VARIANTS[name])
    tokens = token_ids(150, seed=1)

    assert error(all_logits(load(folder), tokens), peer_logits(folder, tokens)) < TOLERANCE


def test_ragged_rows_equal_the_peers(tmp_path: Path) -> None:
    """Rows before, at and long past their windows' ends give what each has alone."""
    folder = write_kin(tmp_path, VARIANTS["linear rope"])
    model = load(folder)

    assert worst_ragged(model, folder, [3, 38, 300, 75]) < TOLERANCE


def test_joined_passes_equal_the_peers(tmp_path: Path) -> None:
    """Where all layers' caches are standard ones, passes are joined, each layer by its rotation."""
    folder = write_kin(tmp_path, VARIANTS["window as long as the context"])

    assert worst_joined(load(folder), folder) < TOLERANCE


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "unpacked"])
def test_quantised_checkpoints_equal_the_peers(tmp_path: Path, *, packed: bool) -> None:
    """What mlx-lm's converter writes gives mlx-lm's logits, a scaled packed embedding included."""
    folder = write_quantised(tmp_path, VARIANTS["linear rope"])
    tokens = token_ids(90, seed=2)
    model = build(folder, packed=packed)

    assert error(all_logits(model, tokens), peer_logits(folder, tokens)) < TOLERANCE
    assert any(array.dtype == mx.uint32 for array in model.parameters().values()) is packed


Mutation = Callable[[DecoderConfig], dict[str, Any]]
MUTATIONS: dict[str, tuple[str, Mutation]] = {
    "no window": ("plain", lambda c: {"windows": (None,) * c.layers}),
    "one rotation for all": ("plain", lambda _: {"ropes": None}),
    "no linear scaling": (
        "linear rope",
        lambda c: {"ropes": tuple(replace(rope, position_scale=1.0) for rope in c.ropes or ())},
    ),
    "linear scaling everywhere": (
        "linear rope",
        lambda c: {
            "ropes": tuple(replace(rope, position_scale=c.rope.position_scale)
                           for rope in c.ropes or ())
        },
    ),
    "queries and keys not normalised": ("plain", lambda _: {"head_norms": False}),
    "norms as stored": ("plain", lambda _: {"norms_from_one": False}),
    "no norms of outputs": ("plain", lambda _: {"output_norms": False}),
    "embeddings not scaled": ("plain", lambda _: {"embedding_scale": 1.0}),
    "scores scaled by the head": ("plain", lambda _: {"score_scale": None}),
    "other activation": ("plain", lambda _: {"activation": Activation.SILU}),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTATIONS)
def test_each_branch_acts(name: str, tmp_path: Path) -> None:
    """With one branch switched off logits are far from mlx-lm's."""
    variant, mutation = MUTATIONS[name]
    folder = write_kin(tmp_path, VARIANTS[variant])
    tokens = token_ids(130, seed=4)
    model = build(folder, **mutation(parse_folder(folder)))

    assert error(all_logits(model, tokens), peer_logits(folder, tokens)) > 10 * TOLERANCE


def test_capped_logits_are_the_peers_bent(tmp_path: Path) -> None:
    """`final_logit_softcapping` bends logits as transformers does; mlx-lm passes it by."""
    folder = write_kin(tmp_path, change(GEMMA3, final_logit_softcapping=3.0))
    tokens = token_ids(60, seed=5)
    plain = peer_logits(folder, tokens)

    got = all_logits(load(folder), tokens)

    assert error(got, 3.0 * mx.tanh(plain / 3.0)) < TOLERANCE
    assert error(got, plain) > 10 * TOLERANCE


def test_the_published_config_gives_the_peers_logits(tmp_path: Path) -> None:
    """The keys of a real config, its shape shrunk, are understood as mlx-lm understands them."""
    path = real_input("configs", "shrunk", "gemma-3-270m-it", "config.json")
    config = json.loads(path.read_text())
    folder = write_kin(tmp_path, config)
    tokens = token_ids(90, seed=6, vocab=config["vocab_size"])

    assert error(all_logits(load(folder), tokens), peer_logits(folder, tokens)) < TOLERANCE


def test_a_head_stored_beside_the_embedding_is_a_copy(tmp_path: Path) -> None:
    """Older converters store the tied head once more: it must be the embedding, and is not kept."""
    config, weights = VARIANTS["plain"], kin_weights(VARIANTS["plain"])
    embedding = weights["model.embed_tokens.weight"]
    load(write_model(tmp_path / "copy", config, weights | {"lm_head.weight": embedding}))

    with pytest.raises(InvalidModel, match="differs"):
        load(write_model(tmp_path / "other", config, weights | {"lm_head.weight": 2 * embedding}))


NEWER, OLDER = "model.language_model.", "language_model.model."


def nested_config(name: str = "plain") -> dict[str, Any]:
    """Return the config of a model that sees, whose text is a variant and all that is stored."""
    text = VARIANTS[name]
    return {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "text_config": text,
        "vision_config": {"hidden_size": 8},
        "vocab_size": text["vocab_size"],
        "tie_word_embeddings": text.get("tie_word_embeddings", True),
    }


def nested_weights(config: Mapping[str, Any]) -> dict[str, mx.array]:
    """Return the text's weights as a part of the whole."""
    own = kin_weights(config["text_config"])
    return {OLDER + name.removeprefix("model."): array for name, array in own.items()}


def nest(folder: Path, *, before: str = OLDER, packed: bool = False) -> Path:
    """Write the text, the plain variant, of a model that sees, as mlx-lm's converter keeps it."""
    config = nested_config()
    text = config["text_config"]
    stored = kin_weights(text)
    if packed:
        packed_config, stored = quantise(text, stored)
        query = "model.layers.1.self_attn.q_proj"
        words, scales, biases = mx.quantize(kin_weights(text)[f"{query}.weight"], 64, 8)
        stored |= {
            f"{query}.weight": words, f"{query}.scales": scales, f"{query}.biases": biases,
        }  # fmt: skip
        own = {query.replace("model.", before, 1): {"group_size": 64, "bits": 8}}
        config["quantization"] = {**packed_config["quantization"], **own}
    named = {before + name.removeprefix("model."): array for name, array in stored.items()}
    return write_model(folder, config, named)


@pytest.mark.parametrize("packed", [False, True], ids=["numbers", "packed"])
def test_the_text_of_a_model_that_sees_equals_the_peers(tmp_path: Path, *, packed: bool) -> None:
    """Taken out of the whole by name, also where single weights are packed by a name of theirs."""
    folder = nest(tmp_path, packed=packed)
    tokens = token_ids(90, seed=8)

    assert error(all_logits(build(folder, packed=packed), tokens), peer_logits(folder, tokens)) < (
        TOLERANCE
    )


def test_both_namings_of_a_model_that_sees_are_one_model(tmp_path: Path) -> None:
    """As older and as newer libraries name the parts, and as the text alone: the same arrays."""
    folders = [nest(tmp_path / "a"), nest(tmp_path / "b", before=NEWER)]
    alone = load(write_kin(tmp_path / "c", VARIANTS["plain"])).parameters()

    for folder in folders:
        parameters = load(folder).parameters()
        assert parameters.keys() == alone.keys()
        assert all(mx.array_equal(array, alone[name]) for name, array in parameters.items())


def test_parts_that_nobody_knows_are_refused_by_the_stored_name(tmp_path: Path) -> None:
    """A part that is neither the text's nor one that sees, one that is there twice, and no text."""
    folder = nest(tmp_path)
    stored, config = stored_in(folder), json.loads((folder / "config.json").read_text())
    norm = "language_model.model.norm.weight"
    for more, field in (
        ({"audio_tower.weight": mx.ones(4)}, "audio_tower.weight"),
        ({"model.norm.weight": mx.ones(64)}, None),
        ({norm: mx.ones(63)}, norm),
    ):
        with pytest.raises(InvalidModel) as caught:
            load(write_model(folder, config, stored | more))
        assert caught.value.field in ((field,) if field else ("model.norm.weight", norm))
    with pytest.raises(InvalidModel) as caught:
        load(write_model(folder, {**config, "text_config": None}, stored))
    assert caught.value.field == "text_config"


def test_the_embeddings_scale_is_rounded_as_bfloat16_does() -> None:
    """The scale is the root of the width to the eight digits of bfloat16, whatever the form."""
    widths = [64, 640, 1152, 2560, 3840, 5376, *range(1, 3000, 37)]

    for width in widths:
        wanted = mx.array(math.sqrt(width), dtype=mx.bfloat16).item()
        assert round_to_bfloat16(math.sqrt(width)) == wanted
    assert round_to_bfloat16(math.sqrt(1152)) == 34.0


def test_a_sum_in_float16_stays_finite() -> None:
    """What would be beyond float16 ends at its largest number; other types add as they are."""
    large = mx.array([60000.0, -60000.0, 1.5], dtype=mx.float16)

    assert bounded_sum(large, large).tolist() == [65504.0, -65504.0, 3.0]
    assert bounded_sum(large.astype(mx.float32), large).tolist() == [120000.0, -120000.0, 3.0]
