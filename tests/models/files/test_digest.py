"""A model's identity: equal content, equal digest; anything else differs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from mlxd_models.files.digest import SAMPLE_BYTES_MAX, model_digest
from mlxd_models.files.weights import read_weights
from mlxd_shared.domain.errors import InvalidModel
from tests.support.tiny_model import write_tiny_model


def test_a_copy_elsewhere_is_the_same_model(tmp_path: Path) -> None:
    """The digest is of the content, wherever the folder lies, and 64 hexadecimal digits."""
    folder = write_tiny_model(tmp_path / "a")
    copy = tmp_path / "b" / "c"
    shutil.copytree(folder, copy)

    digest = model_digest(folder)
    assert digest == model_digest(copy)
    assert len(digest) == 64
    int(digest, 16)


def test_a_fine_tune_is_another_model(tmp_path: Path) -> None:
    """Weights of equal names, shapes and sizes but other values are told apart."""
    one = write_tiny_model(tmp_path / "a", seed=1)
    two = write_tiny_model(tmp_path / "b", seed=2)

    assert model_digest(one) != model_digest(two)


def test_of_a_large_tensor_its_middle_counts(tmp_path: Path) -> None:
    """So many bytes around it, from the first of them to the last, and none beside them: beginnings
    are alike in fine-tunes that pad their embedding, and reading all would take minutes."""
    folder = write_tiny_model(tmp_path)
    weights = folder / "model.safetensors"
    tensor = max(read_weights(folder).facts, key=lambda fact: fact.nbytes)
    first = (tensor.nbytes - SAMPLE_BYTES_MAX) // 2
    assert 0 < first < first + SAMPLE_BYTES_MAX < tensor.nbytes
    before, content = model_digest(folder), weights.read_bytes()

    def counts(place: int) -> bool:
        changed = bytearray(content)
        changed[tensor.begin + place] ^= 1
        weights.write_bytes(changed)
        return model_digest(folder) != before

    beside = (0, first - 1, first + SAMPLE_BYTES_MAX, tensor.nbytes - 1)
    assert [counts(place) for place in beside] == [False] * 4
    inside = (first, tensor.nbytes // 2, first + SAMPLE_BYTES_MAX - 1)
    assert [counts(place) for place in inside] == [True] * 3


@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"]
)
def test_every_file_counts(tmp_path: Path, name: str) -> None:
    """A changed byte in any configuration or tokenizer file makes another model."""
    folder = write_tiny_model(tmp_path)
    before = model_digest(folder)
    path = folder / name
    path.write_text(json.dumps({**json.loads(path.read_text()), "more": 1}))

    assert model_digest(folder) != before


def test_what_is_beside_the_model_does_not_count(tmp_path: Path) -> None:
    """A README is no part of the model."""
    folder = write_tiny_model(tmp_path)
    before = model_digest(folder)
    (folder / "README.md").write_text("hello")

    assert model_digest(folder) == before


def test_a_damaged_file_has_no_digest(tmp_path: Path) -> None:
    """Truncated weights are refused by name."""
    folder = write_tiny_model(tmp_path)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])

    with pytest.raises(InvalidModel, match="truncated"):
        model_digest(folder)
