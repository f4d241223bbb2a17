"""aliases.json in mlxd's own directory of models: other names for models of any store.

    {"version": 1, "aliases": {"small": "org/name", "work": "org/name@v2"}}

Invariants:
- It is read whole or refused whole: no alias of a damaged file counts.
- It is replaced at once (a new file, renamed over it), one writer at a time: no reader and no crash
  meets half of it, and no two writers undo each other.
- An alias means a model, never another alias.
"""

from __future__ import annotations

import fcntl
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from mlxd_controller.store.shelf import check_name, is_name
from mlxd_models.files.model_files import file_error, parse_json_object, read_file
from mlxd_shared.config import ALIASES_MAX, CONFIG_FILE_BYTES_MAX
from mlxd_shared.domain.errors import InvalidModel, InvalidRequest, ModelNotFound, QueueFull

ALIASES_FILE = "aliases.json"
_LOCK_FILE = ".aliases.lock"
_VERSION = 1
_MODE = 0o644


def read_aliases(folder: Path) -> Mapping[str, str]:
    """Return what each alias means; none where there is no file. Blocks on the disk.

    Raises:
        InvalidModel: the file is damaged; names the alias.
    """
    raw = read_file(folder / ALIASES_FILE, bytes_max=CONFIG_FILE_BYTES_MAX)
    if raw is None:
        return {}
    stated = parse_json_object(raw, file=ALIASES_FILE)
    if stated.get("version") != _VERSION or stated.keys() - {"version", "aliases"}:
        raise InvalidModel(f"not version {_VERSION}, with aliases and nothing else", ALIASES_FILE)
    aliases = stated.get("aliases")
    if not isinstance(aliases, dict) or len(aliases) > ALIASES_MAX:
        raise InvalidModel(f"not at most {ALIASES_MAX} names", ALIASES_FILE, "aliases")
    for alias, target in aliases.items():
        if not is_name(alias) or not isinstance(target, str) or not is_name(target):
            raise InvalidModel(f"{target!r:.80} is not for it", ALIASES_FILE, f"{alias:.80}")
        if target in aliases:
            raise InvalidModel(f"means {target}, an alias itself", ALIASES_FILE, alias)
    return aliases


def set_alias(folder: Path, alias: str, target: str) -> None:
    """Have an alias mean a model from now on; the directory is made if need be.

    Raises:
        InvalidRequest: one of them is no name, or an alias where a model belongs, or the other way.
        QueueFull: there are as many aliases as may be.
        InvalidModel: the file is damaged, or cannot be written.
    """
    check_name(alias)
    check_name(target)

    def change(aliases: dict[str, str]) -> None:
        if target in aliases or target == alias:
            raise InvalidRequest.of("model", f"{target} is an alias itself")
        if alias in aliases.values():
            raise InvalidRequest.of("alias", f"other aliases mean {alias}")
        if alias not in aliases and len(aliases) >= ALIASES_MAX:
            raise QueueFull("aliases", ALIASES_MAX)
        aliases[alias] = target

    _change(folder, change)


def remove_alias(folder: Path, alias: str) -> None:
    """Forget an alias.

    Raises:
        ModelNotFound: there is none of this name.
        InvalidModel: the file is damaged, or cannot be written.
    """

    def change(aliases: dict[str, str]) -> None:
        if aliases.pop(alias, None) is None:
            raise ModelNotFound(alias, "there is no such alias")

    _change(folder, change)


def _change(folder: Path, change: Callable[[dict[str, str]], None]) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _alone(folder):
            aliases = dict(read_aliases(folder))
            change(aliases)
            _replace(folder, aliases)
    except OSError as error:
        raise file_error(error, ALIASES_FILE, doing="cannot be written: ") from error


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Keep other writers out; a process that dies lets them in."""
    descriptor = os.open(folder / _LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, _MODE)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _replace(folder: Path, aliases: Mapping[str, str]) -> None:
    stated = {"version": _VERSION, "aliases": dict(sorted(aliases.items()))}
    descriptor, name = tempfile.mkstemp(dir=folder, prefix=f".{ALIASES_FILE}.")
    path = Path(name)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
            stream.write(json.dumps(stated, indent=2) + "\n")
            stream.flush()
            os.fsync(stream.fileno())
        path.chmod(_MODE)
        path.replace(folder / ALIASES_FILE)
    finally:
        path.unlink(missing_ok=True)
