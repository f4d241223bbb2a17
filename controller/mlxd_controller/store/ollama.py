"""Ollama's store, read in place: its models that have tensors, under their names there.

A model is MODEL:TAG, NAMESPACE/MODEL:TAG or HOST/NAMESPACE/MODEL:TAG; the defaults are `latest`,
`library` and `registry.ollama.ai`. Models in GGUF are for another engine: they are not listed, and
a request for one is refused with that reason.

The store is never written to, and no part of a name leads out of it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from mlxd_controller.runtime.ports import StoreKind
from mlxd_controller.store.shelf import Place, entries, is_file, is_name
from mlxd_models.files.ollama_manifest import MANIFESTS, is_gguf, read_manifest
from mlxd_models.files.stored_files import check_inside
from mlxd_shared.config import FOLDER_ENTRIES_MAX
from mlxd_shared.domain.errors import MlxdError

HOST_DEFAULT = "registry.ollama.ai"
NAMESPACE_DEFAULT = "library"
TAG_DEFAULT = "latest"

_PART = re.compile(r"\w[\w.-]{0,127}")
_HOST = re.compile(r"\w[\w.-]{0,127}(?::\d{1,5})?")


class OllamaShelf:
    """Implements Shelf over Ollama's directory of models."""

    kind = StoreKind.OLLAMA

    def __init__(self, root: Path) -> None:
        """root: the directory with `manifests` and `blobs`; if missing there are no models."""
        self._manifests = root / MANIFESTS

    def places(self) -> Iterator[Place]:
        """Yield each manifest of tensors, and each damaged one; see Shelf."""
        for parts in islice(self._find_tags(), FOLDER_ENTRIES_MAX):
            name = _name_of(*parts)
            place = self._place(name, parts)
            if is_name(name) and place is not None and not _is_for_others(place):
                yield place

    def find(self, name: str) -> Place | None:
        """Return the place of a name's manifest; see Shelf."""
        parts = _parts_of(name)
        return None if parts is None else self._place(_name_of(*parts), parts)

    def _find_tags(self) -> Iterator[tuple[str, str, str, str]]:
        for host in entries(self._manifests):
            for namespace in _below(self._manifests / host):
                for model in _below(self._manifests / host / namespace):
                    for tag in _below(self._manifests / host / namespace / model):
                        if _HOST.fullmatch(host) and _are_parts(namespace, model, tag):
                            yield host, namespace, model, tag

    def _place(self, name: str, parts: tuple[str, str, str, str]) -> Place | None:
        path = self._manifests.joinpath(*parts)
        if not is_file(path):
            return None
        try:
            check_inside(path, self._manifests.resolve(), name="/".join(parts))
        except MlxdError as error:
            return Place(name, path, self.kind, error)
        return Place(name, path, self.kind)


def _below(folder: Path) -> list[str]:
    """Return the entries of a directory of the store; links may lead out of it."""
    return [] if folder.is_symlink() else entries(folder)


def _are_parts(*parts: str) -> bool:
    return all(_PART.fullmatch(part) and ".." not in part for part in parts)


def _parts_of(name: str) -> tuple[str, str, str, str] | None:
    """Return host, namespace, model and tag; None if it is not a name of this store."""
    *before, last = name.split("/")
    model, colon, tag = last.partition(":")
    tag = tag if colon else TAG_DEFAULT
    if len(before) > 2:
        return None
    host, namespace = (*(HOST_DEFAULT, NAMESPACE_DEFAULT)[: 2 - len(before)], *before)
    if not _HOST.fullmatch(host) or not _are_parts(namespace, model, tag):
        return None
    return host, namespace, model, tag


def _name_of(host: str, namespace: str, model: str, tag: str) -> str:
    """Return the shortest name, always with the tag, as Ollama lists it."""
    if host != HOST_DEFAULT:
        return f"{host}/{namespace}/{model}:{tag}"
    return f"{model}:{tag}" if namespace == NAMESPACE_DEFAULT else f"{namespace}/{model}:{tag}"


def _is_for_others(place: Place) -> bool:
    """Return whether a manifest is valid but of weights that are not for MLX."""
    try:
        return place.error is None and is_gguf(read_manifest(place.path))
    except MlxdError:
        return False
