"""loaded.json in mlxd's own directory of models: the names that loads gave to folders.

    {"version": 1, "folders": {"tiny": "/models/tiny"}}

Invariants:
- A starting server knows every name that a load has given and nobody has forgotten, even if the
  server before it was killed during a write.
- A file that is damaged, or of a later version, is set aside, which is logged. One that cannot be
  read now is left alone; if it cannot be read or written, names last as long as the server, which
  is logged too.
- It has at most LOADED_NAMES_MAX names. Servers that share the directory share the file: each
  changes only what it means to change.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from mlxd_controller.store.names_file import VERSION, parse_names
from mlxd_models.files.model_files import read_file
from mlxd_shared.config import CONFIG_FILE_BYTES_MAX, LOADED_NAMES_MAX, PATH_CHARS_MAX
from mlxd_shared.domain.errors import InvalidModel, MlxdError
from mlxd_shared.ops.logs import get_logger
from mlxd_shared.ops.state_file import replace_json, writing_alone

LOADED_FILE = "loaded.json"
ASIDE_FILE = "loaded.json.damaged"
_LOCK_FILE = ".loaded.lock"
_log = get_logger("store")


class RememberedNames:
    """The file of one directory. Every method blocks on the disk, and none raises."""

    def __init__(self, folder: Path | None) -> None:
        """folder: None means that nothing is remembered."""
        self._folder = folder

    def read(self) -> Mapping[str, Path]:
        """Return the folders by name, the oldest name first."""
        if self._folder is None:
            return {}
        try:
            return _read(self._folder / LOADED_FILE)
        except (MlxdError, OSError):
            self._change(self._folder, lambda _: None)  # logs why, and sets the file aside
            return {}

    def put(self, name: str, path: Path, *, instead: str | None = None) -> None:
        """Remember a name, and forget the one that made room for it."""

        def change(names: dict[str, Path]) -> None:
            if instead is not None:
                names.pop(instead, None)
            names.pop(name, None)
            names[name] = path
            while len(names) > LOADED_NAMES_MAX:  # including those of other servers
                del names[next(iter(names))]

        if self._folder is not None:
            self._change(self._folder, change)

    def drop(self, name: str) -> None:
        """Forget a name."""
        if self._folder is not None:
            self._change(self._folder, lambda names: names.pop(name, None))

    def _change(self, folder: Path, change: Callable[[dict[str, Path]], object]) -> None:
        """Apply `change` to the names in the file, and write it if they differ then."""
        path = folder / LOADED_FILE
        try:
            with writing_alone(folder, _LOCK_FILE):
                names = _read_or_set_aside(path)
                before = dict(names)
                change(names)
                if names != before:
                    texts = {name: str(place) for name, place in names.items()}
                    replace_json(path, {"version": VERSION, "folders": texts})
        except OSError as error:
            _log.warning("loaded names are not remembered", file=str(path), reason=str(error))
        except MlxdError as error:
            _log.warning("loaded names are not known", file=str(path), reason=error.describe())


def _read(path: Path) -> dict[str, Path]:
    """Return the file's content.

    Raises:
        MachineShort: it cannot be read now.
        InvalidModel: it is damaged, of a later version, or not accessible.
    """
    raw = read_file(path, bytes_max=CONFIG_FILE_BYTES_MAX)
    return {} if raw is None else _parse(raw)


def _read_or_set_aside(path: Path) -> dict[str, Path]:
    """Return the file's content; set an invalid file aside, and return nothing.

    Raises:
        OSError, MachineShort: it can neither be read nor set aside now.
    """
    try:
        return _read(path)
    except InvalidModel as error:
        aside = path.with_name(ASIDE_FILE)
        path.replace(aside)
        _log.warning("loaded names are lost", file=str(aside), reason=error.describe())
        return {}


def _parse(raw: bytes) -> dict[str, Path]:
    folders = parse_names(raw, file=LOADED_FILE, field="folders", names_max=LOADED_NAMES_MAX)
    for name, place in folders.items():
        if not place.startswith("/") or "\0" in place or len(place) > PATH_CHARS_MAX:
            raise InvalidModel(f"{place!r:.80} is not a folder", LOADED_FILE, f"{name:.80}")
    return {name: Path(place) for name, place in folders.items()}
