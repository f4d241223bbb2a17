"""Stores as their owners write them, made from a model's folder: a hub's cache, and Ollama's."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from mlxd_models.files.safetensors_header import TensorFact, read_header

TENSOR = "application/vnd.ollama.image.tensor"
JSON = "application/vnd.ollama.image.json"
PARAMETERS = "application/vnd.ollama.image.params"
GGUF = "application/vnd.ollama.image.model"
DEFAULTS = ("registry.ollama.ai", "library")


def commit_of(text: str) -> str:
    """Return something that looks like a commit."""
    return hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()


def write_hub_model(
    root: Path, repository: str, folder: Path, *, commit: str, refs: Iterable[str] = ("main",)
) -> Path:
    """Put a folder's files into a hub's cache as one commit, and return its snapshot."""
    home = root / f"models--{repository.replace('/', '--')}"
    snapshot = home / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (home / "blobs").mkdir(exist_ok=True)
    for file in sorted(path for path in folder.iterdir() if path.is_file()):
        content = file.read_bytes()
        blob = home / "blobs" / hashlib.sha256(content).hexdigest()
        blob.write_bytes(content)
        (snapshot / file.name).symlink_to(Path("..", "..", "blobs", blob.name))
    for ref in refs:
        path = home / "refs" / ref
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(commit)
    return snapshot


def tensor_file(
    tensors: Mapping[str, tuple[str, tuple[int, ...], bytes]],
    metadata: object = None,
) -> bytes:
    """Return a safetensors file: type, shape and bytes by name, and texts about them."""
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    end = 0
    for name, (dtype, shape, content) in tensors.items():
        header[name] = {
            "dtype": dtype, "shape": list(shape), "data_offsets": [end, end + len(content)]
        }  # fmt: skip
        end += len(content)
    raw = json.dumps(header).encode()
    contents = b"".join(content for _, _, content in tensors.values())
    return len(raw).to_bytes(8, "little") + raw + contents


def content_of(fact: TensorFact) -> bytes:
    """Return a tensor's bytes."""
    with fact.file.open("rb") as stream:
        stream.seek(fact.begin)
        return stream.read(fact.nbytes)


class OllamaStore:
    """A store that is being written."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "blobs").mkdir(parents=True)

    def layer(self, media_type: str, name: str, content: bytes) -> dict[str, Any]:
        """Keep a blob and return its layer."""
        digest = hashlib.sha256(content).hexdigest()
        (self.root / "blobs" / f"sha256-{digest}").write_bytes(content)
        return {
            "mediaType": media_type, "digest": f"sha256:{digest}", "size": len(content),
            "name": name,
        }  # fmt: skip

    def manifest(
        self,
        model: str,
        layers: list[dict[str, Any]],
        *,
        tag: str = "latest",
        place: Any = DEFAULTS,
    ) -> Path:
        """Write a model's manifest and return its path."""
        path = self.root.joinpath("manifests", *place, model, tag)
        path.parent.mkdir(parents=True, exist_ok=True)
        config = self.layer("application/vnd.docker.container.image.v1+json", "", b"{}")
        path.write_text(json.dumps({"schemaVersion": 2, "config": config, "layers": layers}))
        return path

    def layers_of(self, folder: Path, *, nameless: bool = False) -> list[dict[str, Any]]:
        """Return the layers of a folder's model: a blob for each tensor, and one for each JSON.

        nameless: as older writers did, with the tensor's name in the manifest alone.
        """
        layers = []
        for file in sorted(folder.glob("*.safetensors")):
            for fact in read_header(file):
                name = "data" if nameless else fact.name
                content = tensor_file({name: (fact.dtype, fact.shape, content_of(fact))})
                layers.append(self.layer(TENSOR, fact.name, content))
        files = sorted(folder.glob("*.json"))
        layers.extend(self.layer(JSON, file.name, file.read_bytes()) for file in files)
        return layers
