"""The file of keys: read again when it changes, and written so that nobody reads half of it.

Invariants:
- A file that has become unreadable or wrong changes nothing: the keys that it had before hold, and
  the log says so once for each such state.
- Whoever writes it has read it under the same lock: two commands at once lose no key.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias

from mlxd_shared import config
from mlxd_shared.domain.errors import BadCredentials
from mlxd_shared.ops.logs import get_logger
from mlxd_shared.ops.state_file import OWNERS, replace_json, writing_alone
from mlxd_shared.security.certificates import read_secret
from mlxd_shared.security.keys import Key, KeyRing, describe_keys, parse_keys

Signature: TypeAlias = tuple[int, int, int] | None
_log = get_logger("security")


def read_keys(path: Path) -> KeyRing:
    """Return the keys of a file.

    Raises:
        BadCredentials: it cannot be read, or is not of the form that `parse_keys` reads.
    """
    return parse_keys(read_secret(path), file=str(path))


class KeyFile:
    """Keys as a file has them now, or had them a moment ago."""

    def __init__(self, path: Path, *, look_s: float = config.KEYS_LOOK_S) -> None:
        """Read the file.

        look_s: how old what is known of it may be.

        Raises:
            BadCredentials: as `read_keys`.
        """
        self._path = path
        self._look_s = look_s
        self._signature = _signature(path)
        self._ring = read_keys(path)
        self._looked_s = time.monotonic()

    @property
    def ring(self) -> KeyRing:
        """The keys. Looks at the file's time and size once in `look_s`, and blocks for that."""
        now_s = time.monotonic()
        if now_s - self._looked_s >= self._look_s:
            self._looked_s = now_s
            self._read_again()
        return self._ring

    def _read_again(self) -> None:
        signature = _signature(self._path)
        if signature == self._signature:
            return
        self._signature = signature
        try:
            self._ring = read_keys(self._path)
        except BadCredentials as error:
            _log.error("keys stay as they were", reason=error.describe())
        else:
            _log.info("keys were read again", file=str(self._path), count=len(self._ring.keys))


def _signature(path: Path) -> Signature:
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


@contextmanager
def editing(path: Path) -> Iterator[list[Key]]:
    """Yield the keys of a file, or none where there is no file, and write them back afterwards.

    Written beside, to the disk, and renamed; readable by its owner alone. Blocks while another
    process edits it. Where the body raises, nothing is written.

    Raises:
        BadCredentials: as `read_keys`; or it cannot be written.
    """
    try:
        with writing_alone(path.parent, f".{path.name}.lock"):
            keys = list(read_keys(path).keys) if path.exists() else []
            yield keys
            replace_json(path, describe_keys(keys), mode=OWNERS)
    except OSError as error:
        raise BadCredentials(str(path), f"cannot be written: {error.strerror}") from error
