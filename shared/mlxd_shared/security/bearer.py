"""The bearer token: one secret that a caller sends with every call, and how it is compared.

Invariants:
- A token comes from a file, never from a command line, and is in no log line and no message.
- The comparison takes the same time wherever and however long the tokens differ.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import time
from pathlib import Path

from mlxd_shared import config
from mlxd_shared.domain.errors import BadCredentials
from mlxd_shared.ops.logs import get_logger
from mlxd_shared.security.certificates import read_secret

REFUSAL = "valid credentials are needed"
"""All that a refused caller is told."""

HEADER = "authorization"
_SCHEME = "bearer "
_SHAPE = re.compile(
    rf"[A-Za-z0-9._~+/-]{{{config.TOKEN_CHARS_MIN},{config.TOKEN_CHARS_MAX}}}={{0,2}}"
)
_log = get_logger("security")


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


class Refusals:
    """The log of refused callers: a line at most every REFUSAL_LOG_INTERVAL_S, with the count."""

    def __init__(self) -> None:
        self._unsaid = 0
        self._said_s = -config.REFUSAL_LOG_INTERVAL_S

    def note(self, peer: str) -> None:
        """Count one refusal; `peer` is where it came from."""
        self._unsaid += 1
        now_s = time.monotonic()
        if now_s - self._said_s >= config.REFUSAL_LOG_INTERVAL_S:
            _log.warning("calls without valid credentials", count=self._unsaid, last_peer=peer)
            self._unsaid, self._said_s = 0, now_s
