"""Random inputs: valid ones with a few things wrong, rather than noise."""

from __future__ import annotations

import json
import random
from typing import Any

from tests.support.json_mutants import mutant

NASTY: tuple[Any, ...] = (
    -1, 0, 1 << 31, 1 << 62, 1 << 200, 10**4000, 1e308, float("nan"), float("inf"), "", "..",
    "../x", "/etc/passwd", "\x00", "\ud800", "a" * 5000, "../" * 40 + "etc/passwd", [], [[]], {},
    None, True, [1 << 40, 1 << 40], [0], [-1], "sha256:" + "g" * 64, "sha256:../../../etc/passwd",
)  # fmt: skip


def wrong(value: Any, rng: random.Random) -> Any:
    """Return JSON with up to four places changed, those last for the worst."""
    for _ in range(rng.randrange(3)):
        value = mutant(value, rng)
    for _ in range(rng.randrange(3)):
        value = _replace_value(value, rng)
    return value


def text_of(value: Any, rng: random.Random) -> bytes:
    """Return JSON as bytes, now and then with bytes changed, cut, doubled or nested."""
    raw = encode(value)
    match rng.randrange(12):
        case 0:
            return raw[: rng.randrange(len(raw) + 1)]
        case 1:
            return b"[" * 100_000 + raw
        case 2:
            return raw.replace(b":", b":" + rng.choice([b"", b"-", b"1e999", b'"', b"\xff"]), 1)
        case 3:
            return b"\xef\xbb\xbf" + raw
        case 4:
            return flip(raw, rng)
        case _:
            return raw


def encode(value: Any) -> bytes:
    """Return JSON as bytes."""
    return json.dumps(value).encode("utf-8", "surrogatepass")


def flip(raw: bytes, rng: random.Random) -> bytes:
    """Return bytes with a few of them changed."""
    changed = bytearray(raw)
    for _ in range(rng.randrange(1, 5)):
        if changed:
            changed[rng.randrange(len(changed))] = rng.randrange(256)
    return bytes(changed)


def _replace_value(value: Any, rng: random.Random) -> Any:
    """Return JSON with one value, anywhere, that is out of all bounds."""
    result = [json.loads(json.dumps(value))]
    holder: Any = result
    key: Any = 0
    while rng.random() < 0.8:
        inner = holder[key]
        if not isinstance(inner, dict | list) or not inner:
            break
        keys: list[Any] = list(inner) if isinstance(inner, dict) else list(range(len(inner)))
        holder, key = inner, rng.choice(keys)
    holder[key] = rng.choice(NASTY)
    return result[0]
