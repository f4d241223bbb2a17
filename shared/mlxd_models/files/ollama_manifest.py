"""Ollama's store: a manifest lists layers, each a blob that is named by the sha256 of its content.

    ROOT/manifests/HOST/NAMESPACE/MODEL/TAG     JSON
    ROOT/blobs/sha256-HEX                       the layers

Invariants:
- Nothing in a manifest is used as a path: a digest is 64 hexadecimal digits or refused, and a
  layer's name is a key, not a place.
- A blob has the size that its manifest says, or is refused; so is a layer whose meaning for the
  weights is unknown, rather than left out.
- What is left out is said here: licence, template, system prompt and messages change no weight.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from mlxd_models.files import stored_files
from mlxd_models.files.model_files import file_error, parse_json_object, read_file
from mlxd_shared.config import MANIFEST_BYTES_MAX, MANIFEST_LAYERS_MAX
from mlxd_shared.domain.errors import InvalidModel

BLOBS = "blobs"
MANIFESTS = "manifests"
PARAMETERS_FILE = "parameters of the manifest"
"""What the layer of default options is called among a model's files; no file has such a name."""

_KIND = "application/vnd.ollama.image."
_TENSOR = f"{_KIND}tensor"
_JSON = f"{_KIND}json"
_PARAMETERS = f"{_KIND}params"
_GGUF = frozenset({f"{_KIND}model", f"{_KIND}projector", f"{_KIND}adapter"})
_LEFT_OUT = frozenset(
    f"{_KIND}{kind}" for kind in ("license", "messages", "prompt", "system", "template")
)
_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")


@dataclass(frozen=True, slots=True)
class Layer:
    """One blob of a model: what it is, which, how long, and what the manifest calls it."""

    media_type: str
    digest: str
    """64 hexadecimal digits."""
    nbytes: int
    name: str

    @property
    def file(self) -> str:
        """The name of its blob."""
        return f"sha256-{self.digest}"


def read_manifest(path: Path) -> tuple[Layer, ...]:
    """Return the layers of a manifest. Blocks on the disk.

    Raises:
        InvalidModel: missing, over a bound, or not a manifest; names the layer.
    """
    raw = read_file(path, bytes_max=MANIFEST_BYTES_MAX)
    if raw is None:
        raise InvalidModel("missing", file=path.name)
    layers = parse_json_object(raw, file=path.name).get("layers")
    if not isinstance(layers, list):
        raise InvalidModel("not a list", file=path.name, field="layers")
    if len(layers) > MANIFEST_LAYERS_MAX:
        raise InvalidModel(f"over {MANIFEST_LAYERS_MAX} layers", file=path.name, field="layers")
    return tuple(_layer(layer, f"layers[{i}]", path.name) for i, layer in enumerate(layers))


def is_gguf(layers: tuple[Layer, ...]) -> bool:
    """Return whether a manifest is of weights for another engine."""
    return any(layer.media_type in _GGUF for layer in layers)


def open_manifest(path: Path) -> stored_files.StoredFiles:
    """Return the files that a manifest in its store lists. Blocks on the disk.

    Raises:
        InvalidModel: the manifest, or a blob that it names, is damaged, missing or leads out of
            the store; or the weights are of a format that is not served.
    """
    root = _root_of(path)
    stored_files.check_inside(path, (root / MANIFESTS).resolve(), name=path.name)
    layers = read_manifest(path)
    if is_gguf(layers):
        raise InvalidModel(stored_files.GGUF_PROBLEM, file=path.name)
    places = dict(_find_blobs(layers, root / BLOBS))
    blobs = {(layer.name, layer.digest): layer for layer in layers if layer.media_type == _TENSOR}
    if not blobs:
        raise InvalidModel("lists no tensors", file=path.name, field="layers")
    return stored_files.StoredFiles(
        path,
        _name_layers(layers, places, path.name),
        tuple(
            stored_files.Blob(layer.name, places[layer.digest])
            for layer in sorted(blobs.values(), key=lambda layer: (layer.digest, layer.name))
        ),
    )


def _root_of(path: Path) -> Path:
    """Return the store of a manifest."""
    if len(path.parents) < 5 or path.parents[3].name != MANIFESTS:
        raise InvalidModel("is neither a folder nor in a store of manifests", file=path.name)
    return path.parents[4]


def _layer(stated: object, field: str, file: str) -> Layer:
    def error(problem: str) -> InvalidModel:
        return InvalidModel(problem, file=file, field=field)

    if not isinstance(stated, Mapping):
        raise error("not an object")
    media_type, name = _text(stated, "mediaType"), _text(stated, "name")
    match = _DIGEST.fullmatch(_text(stated, "digest") or "")
    nbytes = stated.get("size")
    if media_type is None or name is None:
        raise error("mediaType and name are not texts")
    if match is None:
        digest = stated.get("digest")
        raise error(f"digest {digest!r} is not sha256: and 64 hexadecimal digits")
    if type(nbytes) is not int or nbytes < 0:
        raise error(f"size {nbytes!r} is not a size")
    if media_type not in {_TENSOR, _JSON, _PARAMETERS} | _GGUF | _LEFT_OUT:
        raise error(f"{media_type!r} is a kind of layer that is not understood")
    if ".." in PurePosixPath(name).parts or name.startswith("/") or "\0" in name:
        raise error(f"the name {name!r} leads out of the model")
    return Layer(media_type, match[1], nbytes, name)


def _text(stated: Mapping[str, Any], key: str) -> str | None:
    value = stated.get(key)
    return "" if value is None else value if isinstance(value, str) else None


def _find_blobs(layers: tuple[Layer, ...], folder: Path) -> Iterator[tuple[str, Path]]:
    """Give each blob's place by its digest, once it is known to be there and whole."""
    inside = folder.resolve()
    for digest, layer in {layer.digest: layer for layer in layers}.items():
        if layer.media_type in _LEFT_OUT:
            continue
        path = folder / layer.file
        if path.is_symlink():
            stored_files.check_inside(path, inside, name=layer.file)
        try:
            nbytes = path.stat().st_size
        except OSError as error:
            raise file_error(error, layer.file, layer.name) from error
        if nbytes != layer.nbytes:
            problem = f"{nbytes} bytes long, the manifest says {layer.nbytes}"
            raise InvalidModel(problem, file=layer.file, field=layer.name)
        yield digest, path


def _name_layers(
    layers: tuple[Layer, ...], places: Mapping[str, Path], file: str
) -> dict[str, Path]:
    """Return the layers that are files of the model; those of a component's folder are skipped."""
    paths: dict[str, Path] = {}
    for layer in layers:
        if layer.media_type not in (_JSON, _PARAMETERS):
            continue
        name = PARAMETERS_FILE if layer.media_type == _PARAMETERS else layer.name
        if not name:
            raise InvalidModel("a layer without a name", file=file, field=layer.file)
        if "/" in name and name.partition("/")[0] not in stored_files.READ_FOLDERS:
            continue
        if paths.setdefault(name, places[layer.digest]) != places[layer.digest]:
            problem = "two layers of one name and of different content"
            raise InvalidModel(problem, file=file, field=name)
    return paths
