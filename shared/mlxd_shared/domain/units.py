"""Bytes and durations, to and from what people write."""

from __future__ import annotations

import math
import re

from mlxd_shared.config import DURATION_MAX_S

_SIZES = {"": 1, "b": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_SIZE = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?\s*$", re.IGNORECASE)
_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_PART = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(ns|us|µs|ms|s|m|h)")
FOREVER_S = math.inf


def format_bytes(nbytes: float) -> str:
    """Return e.g. `1.5 GiB`; whole bytes below 1 KiB."""
    size = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def parse_bytes(text: str) -> int:
    """Return the bytes in `text`, such as `512`, `10G` or `1.5 GiB` (powers of 1024).

    Raises:
        ValueError: `text` is not a size.
    """
    match = _SIZE.match(text)
    size = math.inf if match is None else float(match[1]) * _SIZES[match[2].lower()]
    if not math.isfinite(size):
        raise ValueError(f"{text!r:.80} is not a size; write for example 512M or 1.5G")
    return int(size)


def parse_duration(text: str) -> float:
    """Return seconds; a bare number is seconds, any negative value means for ever.

    Accepts `300`, `90s`, `1h2m3.5s`, `-1`. Zero stays zero.

    Raises:
        ValueError: `text` is not a duration.
    """
    stripped = text.strip()
    negative = stripped.startswith("-")
    body = stripped.lstrip("+-")
    try:
        seconds = float(body)
    except ValueError:
        seconds = _sum_of_parts(body, text)
    if not math.isfinite(seconds):
        raise ValueError(f"{text!r} is not a duration")
    if negative and seconds > 0:
        return FOREVER_S
    if seconds > DURATION_MAX_S:
        raise ValueError(f"{text!r} is above {DURATION_MAX_S:.0f} s; write -1 for ever")
    return seconds


def timeout_of(seconds: float) -> float | None:
    """Return `seconds` as asyncio's timeouts take them: None is for ever, which math.inf is not.

    An event loop may turn a timeout into milliseconds of an integer, and there is no such infinity.
    """
    return None if math.isinf(seconds) else seconds


def _sum_of_parts(body: str, original: str) -> float:
    parts = _PART.findall(body)
    if not parts or "".join(number + unit for number, unit in parts) != body:
        raise ValueError(
            f"{original!r} is not a duration; write for example 5m, 1h30m or -1 for ever"
        )
    return sum(float(number) * _SECONDS[unit] for number, unit in parts)


def format_duration(seconds: float) -> str:
    """Return e.g. `4m30s`, `1.2s`, `for ever`."""
    if math.isinf(seconds):
        return "for ever"
    if seconds < 60:
        return f"{seconds:.1f}s" if seconds < 10 else f"{seconds:.0f}s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{rest:02d}s"
