"""What a form's folder says of itself for people and for whoever shares room out. Pure.

Invariants:
- Nothing is believed of it that could make a block be used: names and checksums alone do that. A
  folder whose word is missing, torn or foreign is one of an unknown model.
- It never says more than who computed the blocks; tokens are in the blocks alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

ABOUT_NBYTES_MAX = 16 << 10
TEXT_CHARS_MAX = 1024

BLOCK_ASSUMED_S = 0.25
"""What computing a block is taken to need where nobody has measured: 1,000 tokens a second."""

BLOCK_S_MAX = 3600.0
"""More than any block takes: whoever says so has measured nothing."""


@dataclass(frozen=True, slots=True)
class About:
    """Whose blocks a folder has."""

    model: str = ""
    """The name by which it was loaded last."""
    digest: str = ""
    weights: str = ""
    context_length: int = 0
    device: str = ""
    library: str = ""
    block_s: float = BLOCK_ASSUMED_S
    """Seconds that computing one block takes, as measured last."""
    key: str = ""
    """What names the key that its blocks are encrypted with (`DiskKey.id`); empty: they are not."""


NOBODY = About()


def encode_about(about: About) -> bytes:
    """Return the file's bytes."""
    return json.dumps(asdict(about), indent=1).encode() + b"\n"


def decode_about(raw: bytes) -> About:
    """Return what a file says; `NOBODY` where it cannot be read."""
    try:
        stated = json.loads(raw)
    except (ValueError, RecursionError):
        return NOBODY
    if not isinstance(stated, dict):
        return NOBODY
    return About(
        model=_text(stated, "model"),
        digest=_text(stated, "digest"),
        weights=_text(stated, "weights"),
        context_length=_count(stated, "context_length"),
        device=_text(stated, "device"),
        library=_text(stated, "library"),
        block_s=_seconds(stated, "block_s"),
        key=_text(stated, "key"),
    )


def _text(stated: Mapping[str, object], name: str) -> str:
    value = stated.get(name)
    return value[:TEXT_CHARS_MAX] if isinstance(value, str) and value.isprintable() else ""


def _count(stated: Mapping[str, object], name: str) -> int:
    value = stated.get(name)
    return value if type(value) is int and 0 <= value < 1 << 48 else 0


def _seconds(stated: Mapping[str, object], name: str) -> float:
    value = stated.get(name)
    if not isinstance(value, int | float) or isinstance(value, bool):
        return BLOCK_ASSUMED_S
    return float(value) if 0 < value <= BLOCK_S_MAX else BLOCK_ASSUMED_S
