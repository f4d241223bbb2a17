"""Sizes out of config.json: a wrong key becomes an InvalidModel that names it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlxd_shared.errors import InvalidModel

CONFIG_FILE = "config.json"
SIZE_MAX = 1 << 24

Values = Mapping[str, Any]
"""A parsed JSON object."""


def size(values: Values, key: str, *, default: int | None = None) -> int:
    """Return an integer from 1 up; null counts as absent, and without a default absent is wrong.

    Raises:
        InvalidModel: absent, mistyped or out of range.
    """
    value = values.get(key)
    if value is None:
        value = default
    if value is None:
        raise invalid(key, "missing")
    if type(value) is not int or not 1 <= value <= SIZE_MAX:
        raise invalid(key, f"{value!r} is not an integer in 1..{SIZE_MAX}")
    return value


def invalid(field: str, problem: str) -> InvalidModel:
    """Return the error about one key of config.json."""
    return InvalidModel(problem, file=CONFIG_FILE, field=field)
