"""The file with the key that prompts on disk are encrypted with.

A key comes from a file of its user alone, never from a command line, and is in no log line, no
message and no status. Unlike a token's, a file that others can read is refused: what it protects
lies on the same disk.
"""

from __future__ import annotations

import base64
import binascii
import os
import stat
from importlib import import_module
from pathlib import Path

from mlxd_shared import config
from mlxd_shared.blocks.sealing import KEY_NBYTES, DiskKey
from mlxd_shared.domain.errors import BadCredentials, InvalidRequest
from mlxd_shared.ops.extras import check_extra

FIELD = "prefix_disk_key"
SHAPE = f"{KEY_NBYTES} random bytes as hexadecimal digits or in base64, on one line"
MAKING = f"make one with: openssl rand -hex {KEY_NBYTES}"
_FROM_URLS = bytes.maketrans(b"-_", b"+/")


def check_usable() -> None:
    """Refuse to encrypt without the extra, or where what it brings cannot be loaded.

    Raises:
        InvalidRequest: naming `prefix_disk_key`.
    """
    check_extra(FIELD, "cipher", "cryptography")
    try:  # here, not in the thread that writes: it would end
        import_module("cryptography.hazmat.primitives.ciphers")
    except ImportError as error:
        raise InvalidRequest.of(FIELD, f"the extra cipher cannot be loaded: {error}") from error


def read_disk_key(path: Path) -> DiskKey:
    """Return the key in a file.

    Raises:
        InvalidRequest: the extra that encrypts is missing.
        BadCredentials: a key was given in place of a path, and is not repeated; the file cannot be
            read, is another user's, is open to others, or holds anything but one key.
    """
    check_usable()
    if _is_key(str(path)):
        raise BadCredentials(FIELD, f"is a key, not a file: put it into one; {MAKING}")
    content = _read_private(path)
    secret = _parse_key(content)
    if secret is None:
        raise BadCredentials(str(path), f"a key is {SHAPE}; {MAKING}")
    return DiskKey(secret)


def _read_private(path: Path) -> bytes:
    """Return a file's content; what is checked is what is read, whatever its path means meanwhile.

    Raises:
        BadCredentials: it is no regular file of this user's alone, or is empty or too large.
    """
    name, limit = str(path), config.CREDENTIAL_FILE_BYTES_MAX
    try:
        # One that is a pipe must not be waited for.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb", buffering=0) as file:
            _check_private(name, os.fstat(file.fileno()))
            content = file.read(limit + 1)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
        raise BadCredentials(name, "there is no such file") from error
    except OSError as error:
        raise BadCredentials(name, f"cannot be read: {error.strerror}") from error
    if not 1 <= len(content) <= limit:
        raise BadCredentials(name, f"is empty or too large; 1 to {limit} bytes are read")
    return content


def _check_private(name: str, status: os.stat_result) -> None:
    """Refuse what is no regular file, is another user's, or is open to others."""
    if not stat.S_ISREG(status.st_mode):
        raise BadCredentials(name, "there is no such file")
    if status.st_uid != os.geteuid():
        raise BadCredentials(name, "belongs to another user")
    mode = stat.S_IMODE(status.st_mode)
    if mode & 0o077:
        raise BadCredentials(name, f"is open to others (mode {mode:04o}): chmod 600")


def _is_key(path: str) -> bool:
    """Tell whether a path, or what it ends in, is a key: paths are made absolute on their way.

    Base64 has slashes too, so an end may begin at any of them, or behind it; and a path has only
    one where two follow each other.
    """
    slashes = [place for place, letter in enumerate(path) if letter == "/"]
    starts = {0, *slashes, *(place + 1 for place in slashes)}
    ends = [path[start:] for start in starts]
    texts = [*ends, *(end.replace("/", "//", 1) for end in ends)]
    return any(_parse_key(text.encode(errors="replace")) is not None for text in texts)


def _parse_key(content: bytes) -> bytes | None:
    """Return the bytes that a text stands for; None where it stands for no key."""
    text = content.removesuffix(b"\n").removesuffix(b"\r")
    try:
        if len(text) == 2 * KEY_NBYTES:
            return binascii.unhexlify(text)
        secret = base64.b64decode(text.translate(_FROM_URLS), validate=True)
    except ValueError:
        return None
    return secret if len(secret) == KEY_NBYTES else None
