"""The folder for what mlxd's commands keep for their user: logs, what was typed, saved chats."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def state_folder(environment: Mapping[str, str]) -> Path:
    """Return mlxd's folder for state, by XDG's rules; it may not be there yet."""
    base = environment.get("XDG_STATE_HOME", "")
    return Path(base if base.startswith("/") else "~/.local/state").expanduser() / "mlxd"
