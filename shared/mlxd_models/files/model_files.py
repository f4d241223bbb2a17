"""Reading a model's small files: one bound, one meaning of JSON, for all who read them.

Invariants:
- Only regular files are read, so that no read waits for somebody else, as one of a pipe would.
- What the machine lacks (open files, memory, a disk that works) is never said of a file.
- Every text in what is returned can be written as UTF-8. JSON can spell half a character (a lone
  surrogate), which no message of the wire and no log could carry.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any

from mlxd_shared.domain.errors import InvalidModel, MachineShort, MlxdError

_SURROGATE_ESCAPE = "\\ud"
_RESOURCES = {
    errno.EMFILE: "open files",
    errno.ENFILE: "open files",
    errno.ENOMEM: "memory",
    errno.ENOBUFS: "memory",
    errno.EAGAIN: "processes",
    errno.ENOSPC: "disk space",
    errno.EDQUOT: "disk space",
    errno.EIO: "a disk that works",
    errno.ESTALE: "a disk that works",  # one of another machine
}


def read_file(path: Path, *, bytes_max: int, name: str = "") -> bytes | None:
    """Return a file's bytes; None where there is no such file. Blocks on the disk.

    name: what an error calls it; empty: as it is called.

    Raises:
        InvalidModel: over `bytes_max`, unreadable, or not a regular file.
        MachineShort: there are no open files left, or no memory.
    """
    try:
        with open(path, "rb", opener=open_regular) as stream:
            raw = stream.read(bytes_max + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise file_error(error, name or path.name) from error
    if len(raw) > bytes_max:
        raise InvalidModel(f"over {bytes_max} bytes long", file=name or path.name)
    return raw


def parse_json_object(raw: bytes, *, file: str) -> dict[str, Any]:
    """Return the object that `raw` spells; `file` is the name that the error gives.

    Raises:
        InvalidModel: not UTF-8, not JSON, not an object, or half a character in a text.
    """
    try:
        text = raw.decode("utf-8-sig")
        parsed = json.loads(text)
        if _SURROGATE_ESCAPE in text.lower():
            json.dumps(parsed, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:  # both errors of Unicode are ValueErrors
        raise InvalidModel(f"not JSON: {error}", file=file) from error
    if not isinstance(parsed, dict):
        raise InvalidModel("not a JSON object", file=file)
    return parsed


def open_regular(path: str, flags: int) -> int:
    """Open for `open`, without waiting; raises InvalidModel for what is no regular file."""
    descriptor = os.open(path, flags | os.O_NONBLOCK)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise InvalidModel("not a regular file", file=Path(path).name)


def file_error(error: OSError, file: str, field: str = "", *, doing: str = "") -> MlxdError:
    """Return what it means that the system refuses a model's file: its own trouble, or the file's.

    doing: what comes before the system's word, such as "could not be read: ".
    """
    short = machine_short(error, file)
    if short is not None:
        return short
    return InvalidModel(doing + reason(error), file=file, field=field)


def machine_short(error: OSError, place: str) -> MachineShort | None:
    """Return what the machine lacks, where that is why `place` cannot be used; None: it is not."""
    resource = _RESOURCES.get(error.errno or 0)
    return None if resource is None else MachineShort(resource, f"{place}: {error.strerror}")


def reason(error: OSError) -> str:
    """Return what is wrong with a file, for people."""
    return "missing" if isinstance(error, FileNotFoundError) else (error.strerror or "unreadable")
