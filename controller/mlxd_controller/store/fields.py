"""Sizes out of config.json: a wrong key becomes an InvalidModel that names it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlxd_shared.domain.errors import InvalidModel

CONFIG_FILE = "config.json"
SIZE_MAX = 1 << 24
LAYERS_MAX = 4096
"""Layers are gone through one by one, so that a number alone could keep a reader busy."""

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


def layer_count(values: Values) -> int:
    """Return how many layers there are.

    Raises:
        InvalidModel: absent, mistyped, or over LAYERS_MAX.
    """
    layers = size(values, "num_hidden_layers")
    if layers > LAYERS_MAX:
        raise invalid("num_hidden_layers", f"{layers} is over {LAYERS_MAX}")
    return layers


def count(values: Values, key: str, *, default: int) -> int:
    """Return an integer from 0 up; null counts as absent.

    Raises:
        InvalidModel: mistyped or out of range.
    """
    value = values.get(key)
    if value is None:
        return default
    return 0 if type(value) is int and value == 0 else size(values, key)


def invalid(field: str, problem: str) -> InvalidModel:
    """Return the error about one key of config.json."""
    return InvalidModel(problem, file=CONFIG_FILE, field=field)
