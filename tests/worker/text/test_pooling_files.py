"""What a model's files say about vectors of texts, and what is told of what is not served."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mlxd_controller.store.folder import read_folder
from mlxd_models.files.digest import model_digest
from mlxd_shared.domain.errors import InvalidModel
from mlxd_shared.domain.requests import EmbedSpec, Pooling
from mlxd_worker.text.pooling_files import EmbedDefaults, read_embed_defaults
from tests.support.made_stores import JSON, OllamaStore
from tests.support.tiny_model import write_tiny_model

SPEC = EmbedSpec("m", ("a",))
PREFIX = "sentence_transformers.models."
TRANSFORMER = {"idx": 0, "path": "", "type": f"{PREFIX}Transformer"}
POOLING = {"idx": 1, "path": "1_Pooling", "type": f"{PREFIX}Pooling"}
NORMALIZE = {"idx": 2, "path": "2_Normalize", "type": f"{PREFIX}Normalize"}
FLAGS = {
    "word_embedding_dimension": 64, "pooling_mode_cls_token": False,
    "pooling_mode_mean_tokens": False, "pooling_mode_lasttoken": False, "include_prompt": True,
}  # fmt: skip
LAST, MEAN = {"pooling_mode_lasttoken": True}, {"pooling_mode_mean_tokens": True}


def folder_of(place: Path, modules: Any, pooling: Any) -> Path:
    """Write the two files, but for what is None."""
    if modules is not None:
        (place / "modules.json").write_text(json.dumps(modules))
    if pooling is not None:
        (place / "1_Pooling").mkdir()
        (place / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return place


@pytest.mark.parametrize(
    ("modules", "pooling", "expected"),
    [
        (None, None, EmbedDefaults(Pooling.LAST_TOKEN, True)),
        (None, FLAGS | MEAN, EmbedDefaults(Pooling.MEAN, True)),
        ([TRANSFORMER, POOLING], FLAGS | LAST, EmbedDefaults(Pooling.LAST_TOKEN, False)),
        ([TRANSFORMER, POOLING, NORMALIZE], FLAGS | MEAN, EmbedDefaults(Pooling.MEAN, True)),
        ([TRANSFORMER, POOLING], {"pooling_mode": "mean"}, EmbedDefaults(Pooling.MEAN, False)),
        (None, {"word_embedding_dimension": 64}, EmbedDefaults(Pooling.MEAN, True)),
        ([TRANSFORMER], FLAGS | MEAN, EmbedDefaults(Pooling.LAST_TOKEN, False)),
    ],
)
def test_the_files_say_how_texts_become_vectors(
    tmp_path: Path, modules: Any, pooling: Any, expected: EmbedDefaults
) -> None:
    """Mode and scaling; a request's own words come first."""
    defaults = read_embed_defaults(folder_of(tmp_path, modules, pooling))
    assert defaults == expected
    assert (defaults.pooling_of(SPEC), defaults.normalizes(SPEC)) == (
        defaults.pooling,
        defaults.normalize,
    )
    other = EmbedSpec("m", ("a",), pooling=Pooling.MEAN, normalize=False)
    assert (defaults.pooling_of(other), defaults.normalizes(other)) == (Pooling.MEAN, False)


@pytest.mark.parametrize(
    ("modules", "pooling", "file", "words"),
    [
        (None, FLAGS | {"pooling_mode_cls_token": True}, "1_Pooling/config.json", "cls_token"),
        (None, {"pooling_mode": "max"}, "1_Pooling/config.json", "'max'"),
        (None, {"pooling_mode": 7}, "1_Pooling/config.json", "7"),
        (None, FLAGS | MEAN | LAST, "1_Pooling/config.json", "several"),
        (None, FLAGS, "1_Pooling/config.json", "none is chosen"),
        (None, [], "1_Pooling/config.json", "not a JSON object"),
        ([POOLING, {**NORMALIZE, "type": f"{PREFIX}Dense"}], LAST, "modules.json", "Dense"),
        ([{**POOLING, "path": "../x"}], None, "modules.json", "'../x'"),
        (["x"], None, "modules.json", "no list"),
        ({}, None, "modules.json", "no list"),
    ],
)
def test_what_is_not_served_is_told_to_who_leaves_it_open(
    tmp_path: Path, modules: Any, pooling: Any, file: str, words: str
) -> None:
    """By file and field; whoever names the pooling gets it."""
    defaults = read_embed_defaults(folder_of(tmp_path, modules, pooling))
    with pytest.raises(InvalidModel) as caught:
        defaults.pooling_of(SPEC)
    assert caught.value.file == file
    assert words in caught.value.problem
    assert defaults.pooling_of(EmbedSpec("m", ("a",), pooling=Pooling.MEAN)) is Pooling.MEAN


def test_a_pooling_that_is_named_and_missing_refuses_the_model(tmp_path: Path) -> None:
    """Whoever reckons with it and whoever loads it: by another pooling, vectors would be others."""
    folder = folder_of(write_tiny_model(tmp_path / "m"), [TRANSFORMER, POOLING], None)
    for read in (read_embed_defaults, read_folder):
        with pytest.raises(InvalidModel, match="missing") as caught:
            read(folder)
        assert caught.value.file == "1_Pooling/config.json"

    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(FLAGS | MEAN))
    assert read_embed_defaults(folder).pooling is Pooling.MEAN
    assert read_folder(folder).digest == model_digest(folder)


def test_a_store_of_blobs_has_the_pooling_too(tmp_path: Path) -> None:
    """Its manifest names files of the model's folders by FOLDER/NAME; those of others stay out."""
    folder = folder_of(write_tiny_model(tmp_path / "m"), [TRANSFORMER, POOLING], None)
    store = OllamaStore(tmp_path / "ollama")
    layers = store.layers_of(folder)
    other = store.layer(JSON, "text_encoder/config.json", b"[]")
    with pytest.raises(InvalidModel, match="missing"):
        read_embed_defaults(store.manifest("without", [*layers, other]))
    pooling = store.layer(JSON, "1_Pooling/config.json", json.dumps(FLAGS | MEAN).encode())
    defaults = read_embed_defaults(store.manifest("with", [*layers, other, pooling]))
    assert defaults.pooling is Pooling.MEAN


def test_models_of_other_vectors_are_other_models(tmp_path: Path) -> None:
    """What the files say about vectors is part of a model's identity."""
    folder = write_tiny_model(tmp_path / "m")
    before = model_digest(folder)
    folder_of(folder, [TRANSFORMER], FLAGS | MEAN)
    between = model_digest(folder)
    (folder / "1_Pooling" / "config.json").write_text("{}")
    assert len({before, between, model_digest(folder)}) == 3
