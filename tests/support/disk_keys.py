"""Files with keys for prompts on disk."""

from __future__ import annotations

from pathlib import Path


def secret_of(seed: int) -> bytes:
    """Return the bytes of a key, the same for one seed."""
    return bytes((seed * 31 + place * 7) % 256 for place in range(32))


def write_key(path: Path, *, seed: int = 1, mode: int = 0o600) -> Path:
    """Write a file with the key of `secret_of(seed)`, in hexadecimal digits; return it."""
    path.write_text(secret_of(seed).hex() + "\n")
    path.chmod(mode)
    return path
