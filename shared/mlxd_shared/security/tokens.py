"""The bearer token: one secret that a caller sends with every call, and the file that has it.

A token comes from a file, never from a command line, and is in no log line and no message.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from pathlib import Path

from mlxd_shared import config
from mlxd_shared.domain.errors import BadCredentials
from mlxd_shared.security.certificates import read_secret

HEADER = "authorization"
_SCHEME = "bearer "
_SHAPE = re.compile(
    rf"[A-Za-z0-9._~+/-]{{{config.TOKEN_CHARS_MIN},{config.TOKEN_CHARS_MAX}}}={{0,2}}"
)


class Token:
    """One secret. It prints as nothing."""

    __slots__ = ("_digest", "_value")

    def __init__(self, value: str) -> None:
        """Keep `value`, of the shape that `read_token` checks."""
        self._value = value
        self._digest = _digest(value)

    def __repr__(self) -> str:
        """Say nothing of the value."""
        return "Token(...)"

    @property
    def header(self) -> tuple[str, str]:
        """The metadata that a caller sends."""
        return HEADER, f"Bearer {self._value}"

    def accepts(self, header: str) -> bool:
        """Return whether `header`, the value of an authorization header, carries this token."""
        # Digests are compared: they have one length, whatever the token's is.
        return hmac.compare_digest(_digest(secret_in(header)), self._digest)


def secret_in(header: str) -> str:
    """Return the secret that the value of an authorization header carries; empty: none."""
    return header[len(_SCHEME) :] if header[: len(_SCHEME)].lower() == _SCHEME else ""


def _digest(value: str) -> bytes:
    return hashlib.sha256(value.encode("utf-8", "surrogateescape")).digest()


def read_token(path: Path) -> Token:
    """Return the token in the first and only line of a file.

    Raises:
        BadCredentials: the file cannot be read, or holds anything but one token.
    """
    try:
        text = read_secret(path).decode("ascii").removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError as error:
        raise BadCredentials(str(path), "holds bytes that no token has") from error
    if not _SHAPE.fullmatch(text):
        limit = f"{config.TOKEN_CHARS_MIN} to {config.TOKEN_CHARS_MAX} letters, digits or ._~+/-"
        raise BadCredentials(str(path), f"a token is one line of {limit}")
    return Token(text)
