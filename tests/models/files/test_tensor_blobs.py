"""Tensors as blobs: their names elsewhere, duplicates, and how they are packed."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest

from mlxd_models.files.model_config import read_model_config
from mlxd_models.files.ollama_manifest import open_manifest
from mlxd_models.files.stored_files import StoredFiles
from mlxd_models.files.tensor_blobs import check_copies, read_blobs
from mlxd_models.files.weights import read_weights
from mlxd_shared.domain.errors import InvalidModel
from tests.support.made_stores import JSON, TENSOR, OllamaStore, tensor_file

Tensors = Mapping[str, tuple[str, tuple[int, ...], bytes]]
F32: tuple[str, tuple[int, ...], bytes] = ("F32", (2,), bytes(8))
WORDS: tuple[str, tuple[int, ...], bytes] = ("U32", (1, 8), bytes(32))
SCALES: tuple[str, tuple[int, ...], bytes] = ("F16", (1, 1), bytes(2))


def files(root: Path, *blobs: bytes, config: bytes = b"{}") -> StoredFiles:
    """Return a model of these blobs."""
    store = OllamaStore(root)
    layers = [store.layer(TENSOR, f"t{index}", blob) for index, blob in enumerate(blobs)]
    return open_manifest(store.manifest("m", [*layers, store.layer(JSON, "config.json", config)]))


def names(stored_files: StoredFiles) -> set[str]:
    """Return what its tensors are called."""
    return {fact.name for fact in read_weights(stored_files).facts}


def test_scales_and_offsets_are_renamed_in_any_order(tmp_path: Path) -> None:
    """X.scale and X.bias of a packed X belong to its module, whichever blob comes first; a bias
    without a scale is one; never is a name made that ends in weight_qbias."""
    parts: dict[str, Any] = {
        "a.q.weight": WORDS, "a.q.weight.scale": SCALES, "a.q.weight.bias": SCALES,
        "a.q.bias": F32, "a.router.scale": F32,
    }  # fmt: skip
    wanted = {"a.q.weight", "a.q.scales", "a.q.biases", "a.q.bias", "a.router.scale"}
    for index, order in enumerate(permutations(parts)):
        if index % 24 == 0:
            blobs = [tensor_file({name: parts[name]}) for name in order]
            assert names(files(tmp_path / str(index), *blobs)) == wanted
    together = files(tmp_path / "one", tensor_file(parts))
    assert names(together) == wanted
    assert {f.stored_name for f in read_weights(together).facts} == set(parts)


def test_a_bias_without_a_scale_keeps_its_name(tmp_path: Path) -> None:
    """It is no offset of a packed weight."""
    blob = tensor_file({"a.weight": F32, "a.weight.bias": F32, "a.bias": F32})
    assert names(files(tmp_path / "s", blob)) == {"a.weight", "a.weight.bias", "a.bias"}


def test_a_tensor_that_is_stored_again_must_be_the_same(tmp_path: Path) -> None:
    """The same bytes in two blobs are one tensor; other bytes, types or shapes are an error that
    names the tensor and both blobs."""
    extra = {"other": F32}
    same = files(tmp_path / "same", tensor_file({"a": F32}), tensor_file({"a": F32} | extra))
    facts, copies = read_blobs(same)
    assert sorted(fact.name for fact in facts) == ["a", "other"]
    assert len(copies) == 1
    check_copies(copies)

    changed = ("F32", (2,), bytes(7) + b"\1")
    differs = files(tmp_path / "d", tensor_file({"a": F32}), tensor_file({"a": changed} | extra))
    with pytest.raises(InvalidModel, match="other values") as caught:
        check_copies(read_weights(differs).copies)
    assert caught.value.field == "a"
    blobs = {blob.path.name for blob in differs.blobs}
    assert {caught.value.file, *caught.value.problem.replace(",", "").split()} >= blobs

    wide = ("F32", (1, 2), bytes(8))
    shapes = files(tmp_path / "s", tensor_file({"a": F32}), tensor_file({"a": wide} | extra))
    with pytest.raises(InvalidModel, match=r"\[1, 2\]|\[2\]"):
        read_weights(shapes)


def test_one_blob_may_be_two_tensors_of_older_writers(tmp_path: Path) -> None:
    """Norms that are all ones are one blob without a name in it, and two layers with one."""
    store = OllamaStore(tmp_path)
    blob = tensor_file({"data": F32})
    layers = [store.layer(TENSOR, name, blob) for name in ("norm1", "norm2", "norm1")]
    stored_files = open_manifest(store.manifest("m", layers))
    assert sorted(names(stored_files)) == ["norm1", "norm2"]
    assert read_weights(stored_files).copies == ()


def make_packed(words: int, groups: int) -> Tensors:
    """Return a packed weight of so many words and scales a row."""
    return {
        "a.weight": ("U32", (1, words), bytes(4 * words)),
        "a.weight.scale": ("F16", (1, groups), bytes(2 * groups)),
        "a.weight.bias": ("F16", (1, groups), bytes(2 * groups)),
    }


@pytest.mark.parametrize(
    ("words", "groups", "metadata", "wanted"),
    [
        (8, 1, {"quant_type": "int4"}, {"group_size": 64, "bits": 4}),
        (8, 1, {"quant_type": "Q8", "group_size": "32"}, {"group_size": 32, "bits": 8}),
        (4, 1, {"quant_type": "mxfp4"}, {"group_size": 32, "bits": 4, "mode": "mxfp4"}),
        (2, 1, {"quant_type": "NVFP4"}, {"group_size": 16, "bits": 4, "mode": "nvfp4"}),
        (
            8, 1, {"quant_type": "int4", "a.weight.quant_type": "mxfp8"},
            {"group_size": 32, "bits": 8, "mode": "mxfp8"},
        ),
        (4, 1, None, {"group_size": 32, "bits": 4}),
        (16, 1, None, {"group_size": 64, "bits": 8}),
        (2, 1, None, {"group_size": 16, "bits": 4}),
        (32, 1, None, {"group_size": 128, "bits": 8}),
    ],
)  # fmt: skip
def test_the_packing_is_what_the_metadata_says_or_the_shapes(
    words: int, groups: int, metadata: dict[str, str] | None, wanted: Any, tmp_path: Path
) -> None:
    """As config.json says it; a tensor's own word goes before its file's."""
    stored_files = files(tmp_path / "s", tensor_file(make_packed(words, groups), metadata))
    assert read_model_config(stored_files)["quantization"] == wanted


def test_ambiguous_shapes_are_told_by_a_hint_or_refused(tmp_path: Path) -> None:
    """4 bits in groups of 64 and 8 bits in groups of 32 look alike; another blob may tell."""
    with pytest.raises(InvalidModel, match="nothing says how") as caught:
        read_model_config(files(tmp_path / "a", tensor_file(make_packed(8, 1))))
    assert caught.value.field == "a.weight"
    hint = tensor_file({"b": F32}, {"quant_type": "int8"})
    model_config = read_model_config(files(tmp_path / "b", tensor_file(make_packed(8, 1)), hint))
    assert model_config["quantization"] == {"group_size": 32, "bits": 8}


@pytest.mark.parametrize(
    "metadata", [{"quant_type": "int3"}, {"quant_type": "int4", "group_size": "-1"}]
)
def test_a_packing_that_is_not_known_is_refused(metadata: dict[str, str], tmp_path: Path) -> None:
    """By name, and never taken for another."""
    with pytest.raises(InvalidModel, match=r"int3|'-1'"):
        read_model_config(files(tmp_path / "s", tensor_file(make_packed(8, 1), metadata)))


def test_the_common_packing_comes_first_and_exceptions_by_name(tmp_path: Path) -> None:
    """And what the config says of an original's packing holds no longer."""
    blobs = [
        tensor_file(
            {name.replace("a.", f"{stem}."): value for name, value in make_packed(8, 1).items()},
            {"quant_type": kind},
        )
        for stem, kind in (("a", "int4"), ("b", "int4"), ("c", "mxfp8"))
    ]
    config = b'{"quantization_config": {"quant_method": "fp8"}}'
    values = read_model_config(files(tmp_path / "s", *blobs, config=config))
    assert values == {
        "quantization": {
            "group_size": 64, "bits": 4, "c": {"group_size": 32, "bits": 8, "mode": "mxfp8"},
        }
    }  # fmt: skip
