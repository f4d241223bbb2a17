"""Ollama's manifests and blobs: what is read, and each way in which they can be wrong, by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from mlxd_models.files.digest import model_digest
from mlxd_models.files.generation_defaults import read_generation_defaults
from mlxd_models.files.model_config import read_model_config
from mlxd_models.files.ollama_manifest import open_manifest
from mlxd_models.files.weights import read_weights
from mlxd_shared.domain.errors import InvalidModel
from tests.support.made_stores import GGUF, JSON, PARAMETERS, OllamaStore
from tests.support.tiny_model import write_tiny_model

Change = Callable[[OllamaStore, list[dict[str, Any]]], None]


@pytest.fixture(name="folder")
def tiny_folder(tmp_path: Path) -> Path:
    """A model."""
    return write_tiny_model(tmp_path / "tiny")


@pytest.fixture(name="store")
def empty_store(tmp_path: Path) -> OllamaStore:
    """A store without models."""
    return OllamaStore(tmp_path / "ollama")


@pytest.mark.parametrize("nameless", [False, True])
def test_a_store_has_the_tensors_and_files_of_the_folder(
    nameless: bool, folder: Path, store: OllamaStore
) -> None:
    """A blob a tensor, named in it or, by older writers, in the manifest alone."""
    manifest = store.manifest("tiny", store.layers_of(folder, nameless=nameless))

    def plain(path: Path) -> set[tuple[object, ...]]:
        return {(f.name, f.dtype, f.shape, f.nbytes) for f in read_weights(path).facts}

    assert plain(manifest) == plain(folder)
    assert read_model_config(manifest) == read_model_config(folder)
    assert read_generation_defaults(manifest) == read_generation_defaults(folder)


def test_the_digest_is_of_the_content(folder: Path, store: OllamaStore) -> None:
    """Not of names or the order of layers; default options and other weights count."""
    layers = store.layers_of(folder)
    one = model_digest(store.manifest("one", layers))
    assert model_digest(store.manifest("two", layers[::-1], tag="8b")) == one

    options = store.layer(PARAMETERS, "", b'{"temperature": 0.25, "stop": ["a"], "num_ctx": 8}')
    chosen = store.manifest("three", [*layers, options])
    assert model_digest(chosen) != one
    assert read_generation_defaults(chosen).temperature == 0.25
    other = store.layers_of(write_tiny_model(folder.parent / "other", seed=2))
    assert model_digest(store.manifest("four", other)) != one


def test_another_manifest_of_the_same_blobs_is_another_signature(
    folder: Path, store: OllamaStore
) -> None:
    """Where it alone names the tensors, two that change places are another model."""
    layers = store.layers_of(folder, nameless=True)
    manifest = store.manifest("tiny", layers)
    before, digest = open_manifest(manifest).signature(), model_digest(manifest)
    swapped = {"model.embed_tokens.weight": "lm_head.weight"}
    swapped |= {other: one for one, other in swapped.items()}
    for layer in layers:
        layer["name"] = swapped.get(layer["name"], layer["name"])
    store.manifest("tiny", layers)

    assert model_digest(manifest) != digest
    assert open_manifest(manifest).signature() != before


def _set(index: int, **values: Any) -> Change:
    return lambda _, layers: layers[index].update(values)


def _escape(store: OllamaStore, layers: list[dict[str, Any]]) -> None:
    blob = store.root / "blobs" / layers[0]["digest"].replace(":", "-")
    (store.root.parent / "elsewhere").write_bytes(blob.read_bytes())
    blob.unlink()
    blob.symlink_to("../../elsewhere")


def _rewrite(store: OllamaStore, layers: list[dict[str, Any]]) -> None:
    (config,) = (layer for layer in layers if layer["name"] == "config.json")
    blob = store.root / "blobs" / config["digest"].replace(":", "-")
    blob.write_bytes(blob.read_bytes().replace(b"512", b"256", 1))


CHANGES: dict[str, tuple[Change, str]] = {
    "a digest that is a path": (_set(0, digest="sha256:../../../etc/passwd"), "hexadecimal"),
    "a digest of another kind": (_set(0, digest="md5:" + "0" * 64), "hexadecimal"),
    "a name that leads out": (_set(0, name="../../x"), "leads out"),
    "an absolute name": (_set(-1, name="/etc/passwd"), "leads out"),
    "a size that is none": (_set(0, size=-1), "not a size"),
    "a size of another file": (_set(0, size=17), "the manifest says 17"),
    "a kind that is not known": (_set(0, mediaType="application/x"), "not understood"),
    "a blob that is not there": (_set(0, digest="sha256:" + "0" * 64), "missing"),
    "a part of a model of several": (
        lambda store, layers: layers.append(
            store.layer("application/vnd.ollama.image.tensor", "vae/a", _one_tensor("vae/a"))
        ),
        "several parts",
    ),
    "two files of one name": (
        lambda store, layers: layers.append(store.layer(JSON, "config.json", b"{}")),
        "different content",
    ),
    "a blob behind a link": (_escape, "leads out"),
    "a config that was changed": (_rewrite, "damaged"),
    "no tensors": (lambda _, layers: layers.clear(), "no tensors"),
    "GGUF": (lambda store, layers: layers.append(store.layer(GGUF, "", b"GGUF")), "GGUF"),
    "layers that are none": (lambda _, layers: layers.append(cast("Any", 7)), "not an object"),
}


def _one_tensor(name: str) -> bytes:
    header = json.dumps({name: {"dtype": "F32", "shape": [], "data_offsets": [0, 4]}}).encode()
    return len(header).to_bytes(8, "little") + header + bytes(4)


@pytest.mark.parametrize("case", CHANGES)
def test_what_is_wrong_is_named(case: str, folder: Path, store: OllamaStore) -> None:
    """An InvalidModel each, about the manifest or the blob."""
    change, words = CHANGES[case]
    layers = store.layers_of(folder)
    change(store, layers)
    manifest = store.manifest("bad", layers)

    with pytest.raises(InvalidModel, match=words) as caught:
        model_digest(manifest)
    assert caught.value.file


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"{}", b'{"layers": 3}', b"\xff"])
def test_what_is_no_manifest_is_refused(content: bytes, store: OllamaStore) -> None:
    """Not JSON, not an object, no list of layers: the manifest is named."""
    manifest = store.manifest("bad", [])
    manifest.write_bytes(content)
    with pytest.raises(InvalidModel) as caught:
        open_manifest(manifest)
    assert caught.value.file == "latest"


def test_a_manifest_behind_a_link_out_of_the_store_is_refused(
    folder: Path, store: OllamaStore
) -> None:
    """Its content would come from elsewhere."""
    manifest = store.manifest("m", store.layers_of(folder))
    manifest.rename(store.root.parent / "manifest")
    manifest.symlink_to(store.root.parent / "manifest")
    with pytest.raises(InvalidModel, match="leads out"):
        open_manifest(manifest)
