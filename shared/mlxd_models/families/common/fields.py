"""Typed, ranged reading of config.json: every wrong key becomes an error that names it."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from mlxd_shared.domain.errors import InvalidModel

CONFIG_FILE = "config.json"
NAMES_SHOWN_MAX = 5


def invalid(field: str, problem: str) -> InvalidModel:
    """Return the error about one key of config.json."""
    return InvalidModel(problem, file=CONFIG_FILE, field=field)


@dataclass(frozen=True, slots=True)
class Fields:
    """Typed, ranged reading of one JSON object; a key present as null counts as absent."""

    values: Mapping[str, Any]
    prefix: str = ""

    def has(self, key: str) -> bool:
        """Tell whether the key is there and not null."""
        return self.values.get(key) is not None

    def integer(self, key: str, *, low: int, high: int, default: int | None = None) -> int:
        """Return an integer in `low..high`; without a default the key is required."""
        value = self._value(key, default)
        if type(value) is not int:
            raise self.error(key, f"{value!r} is not an integer")
        if not low <= value <= high:
            raise self.error(key, f"{value} is not in {low}..{high}")
        return value

    def positive(self, key: str, *, default: float | None = None) -> float:
        """Return a finite number above zero; without a default the key is required."""
        value = self._value(key, default)
        if type(value) not in (int, float):
            raise self.error(key, f"{value!r} is not a number")
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if not (math.isfinite(number) and number > 0):
            raise self.error(key, f"{value} is not a finite number above 0")
        return number

    def flag(self, key: str, *, default: bool) -> bool:
        """Return true or false."""
        value = self._value(key, default)
        if type(value) is not bool:
            raise self.error(key, f"{value!r} is not true or false")
        return value

    def demand(self, key: str, only: bool | str) -> None:  # noqa: FBT001 - a value, not a switch
        """Refuse every value of a key but one, which is what its absence means too.

        A text that is null is refused.
        """
        if isinstance(only, str):
            stated = self.values.get(key, only)
            if stated != only:
                raise self.error(key, f"{stated!r} is not supported, only {only!r}")
        elif self.flag(key, default=only) is not only:
            raise self.error(key, f"{str(not only).lower()} is not supported by this architecture")

    def part(self, key: str) -> "Fields":
        """Return the object under a key, which is there."""
        stated = self.values[key]
        if not isinstance(stated, Mapping):
            raise self.error(key, f"{stated!r} is not an object")
        return Fields(stated, f"{self.prefix}{key}.")

    def layers_of(self, key: str, kinds: tuple[str, str], layers: int) -> tuple[bool, ...] | None:
        """Return which layers a list calls the first of two kinds; None where the key is absent."""
        if not self.has(key):
            return None
        stated = self.values[key]
        if not isinstance(stated, list) or any(kind not in kinds for kind in stated):
            raise self.error(key, f"{stated!r} is not a list of {kinds[0]!r} and {kinds[1]!r}")
        if len(stated) != layers:
            raise self.error(key, f"names {len(stated)} layers of {layers}")
        return tuple(kind == kinds[0] for kind in stated)

    def error(self, key: str, problem: str) -> InvalidModel:
        """Return the error about one key, with the path to it."""
        return invalid(self.prefix + key, problem)

    def _value(self, key: str, default: float | None) -> Any:  # noqa: ANN401 - parsed JSON
        value = self.values.get(key)
        if value is None:
            value = default
        if value is None:
            raise self.error(key, "missing")
        return value


def some_names(names: Collection[str]) -> str:
    """Return the first names, and how many there are besides."""
    shown = ", ".join(sorted(names)[:NAMES_SHOWN_MAX])
    rest = len(names) - NAMES_SHOWN_MAX
    return f"{shown} and {rest} more" if rest > 0 else shown
