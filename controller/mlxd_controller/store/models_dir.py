"""mlxd's own directory of models: a folder is a model, named NAME or ORG/NAME.

A folder with a config.json is a model; one without may contain models, one level deep. A link that
leads out of the directory is reported as such, and not followed.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from mlxd_controller.runtime.ports import StoreKind
from mlxd_controller.store.shelf import Place, entries, is_file, is_folder, is_name
from mlxd_models.files.model_config import CONFIG_FILE
from mlxd_models.files.stored_files import check_inside
from mlxd_shared.domain.errors import MlxdError

_DEPTH_MAX = 2


class ModelsShelf:
    """Implements Shelf over a directory of model folders."""

    kind = StoreKind.MODELS

    def __init__(self, root: Path) -> None:
        """root: the directory; if it is missing there are no models."""
        self._root = root

    def places(self) -> Iterator[Place]:
        """Yield each folder that has a config.json; see Shelf."""
        for name in entries(self._root):
            place = self.find(name)
            if place is not None:
                yield place
            elif is_name(name) and not (self._root / name).is_symlink():
                below = (self.find(f"{name}/{own}") for own in entries(self._root / name))
                yield from (place for place in below if place is not None)

    def find(self, name: str) -> Place | None:
        """Return the place of a model's folder; see Shelf."""
        parts = name.split("/")
        if not is_name(name) or len(parts) > _DEPTH_MAX or not all(map(_is_part, parts)):
            return None
        path = self._root.joinpath(*parts)
        if not is_folder(path):
            return None
        try:
            check_inside(path, self._root.resolve(), name=name)
        except MlxdError as error:
            return Place(name, path, self.kind, error)
        return Place(name, path.resolve(), self.kind) if is_file(path / CONFIG_FILE) else None


def _is_part(text: str) -> bool:
    return bool(text) and not text.startswith(".")
