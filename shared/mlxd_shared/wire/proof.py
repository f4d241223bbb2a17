"""What a worker takes its own controller's word for: a secret of the two, sent with a request.

Invariants:
- A worker makes the secret; it goes through the ready pipe to whoever launched the worker, and into
  that one's record of it. It is in no argument, environment, log line, message or metric.
- It opens nothing: a call without it, or with another, is served alike. Its request is counted and
  checked once more, that is all.
- Only a request that passed this version's checks, field by field, is sent with it; and with what
  was counted in it, so that its room can be accounted for.
"""

from __future__ import annotations

import hmac
import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from mlxd_shared import config
from mlxd_shared.wire.wire_scan import Size

KEY = "mlxd-proof"
"""The metadata that it travels in: the secret, and how many parts and numbers were counted."""
_SECRET = re.compile(r"[0-9a-f]{64}")
_WORD = re.compile(rf"({_SECRET.pattern}) ([0-9]{{1,9}}) ([0-9]{{1,9}})")


@dataclass(frozen=True, slots=True)
class Proof:
    """One worker's secret. It prints as nothing."""

    secret: str = field(repr=False)

    def __post_init__(self) -> None:
        """Raise ValueError for what no worker makes."""
        if not _SECRET.fullmatch(self.secret):
            raise ValueError("not a worker's secret")

    @classmethod
    def make(cls) -> Proof:
        """Return one that nobody can guess."""
        return cls(secrets.token_hex(32))

    def word(self, size: Size) -> tuple[str, str]:
        """Return the metadata for a request in which `size` was counted."""
        return KEY, f"{self.secret} {size.parts} {size.numbers}"

    def size_of(self, metadata: Iterable[tuple[str, str | bytes]] | None) -> Size | None:
        """Return a call's counted size, without its bytes; None if its caller is not ours."""
        words = [str(value) for key, value in metadata or () if key == KEY]
        match = _WORD.fullmatch(words[0]) if len(words) == 1 else None
        if match is None or not hmac.compare_digest(match[1], self.secret):
            return None
        return Size(0, int(match[2]), int(match[3]))


@dataclass(frozen=True, slots=True)
class Checked:
    """A client's request behind the checks of the controller's door, serialised for a worker.

    What a client sent stays as it came, for a prompt may be large: by the rules of the wire format
    the last of a field that is there twice counts, entries of lists add up, and messages merge.
    """

    raw: bytes = field(repr=False)
    changes: bytes = field(default=b"", repr=False)
    """Fields that a controller sets, behind those of `raw`."""
    size: Size | None = None
    """What was counted in it, with room for what a controller adds; None: nobody counted."""

    def whole(self, more: bytes = b"") -> bytes:
        """Return the request in one piece, with `more` fields behind all others."""
        return b"".join((self.raw, self.changes, more))

    def vouched_by(self, proof: Proof | None) -> tuple[tuple[str, str], ...]:
        """Return the metadata by which a worker takes it as checked, if it knows of `proof`."""
        return () if proof is None or self.size is None else (proof.word(self.size),)


def with_relay_room(size: Size | None, *, ids: int = 0) -> Size | None:
    """Return `size` with room for what a controller adds, `ids` token ids among it."""
    if size is None:
        return None
    parts = size.parts + config.RELAYED_PARTS_MAX
    return replace(size, parts=parts, numbers=size.numbers + ids)
