"""What the user of `mlxd top` has chosen, and what a key does to it. Pure."""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from mlxd_controller.cli.top.figures import ModelLine


class Sort(enum.Enum):
    """The order of the models."""

    NAME = "name"
    SPEED = "tokens/s"
    MEMORY = "memory"
    QUEUE = "queue"


class Action(enum.Enum):
    """What a key asks for beyond another frame."""

    QUIT = "quit"
    UNLOAD = "unload"


@dataclass(frozen=True, slots=True)
class Choices:
    """The order, the model that is chosen, and the one that is about to be unloaded.

    `chosen` is a name, so that it stays when the order changes; "" is the first model.
    """

    sort: Sort = Sort.NAME
    chosen: str = ""
    confirming: str = ""
    note: str = ""
    """The last thing that was done, or why it could not be."""


_KEY = re.compile(r"\x1b\[[0-9;]*[A-Za-z~]|\x1bO[A-Za-z]|.", re.DOTALL)
_MOVES: Mapping[str, int] = MappingProxyType(
    {
        **dict.fromkeys(("\x1b[A", "\x1bOA", "k"), -1),
        **dict.fromkeys(("\x1b[B", "\x1bOB", "j"), 1),
    }
)
_ORDERS: Mapping[Sort, Callable[[ModelLine], tuple[float, str]]] = MappingProxyType(
    {
        Sort.NAME: lambda line: (0.0, line.name),
        Sort.SPEED: lambda line: (-(line.tokens_per_s or 0.0), line.name),
        Sort.MEMORY: lambda line: (-line.held_nbytes, line.name),
        Sort.QUEUE: lambda line: (-line.waiting, line.name),
    }
)


def split_keys(typed: str) -> Iterator[str]:
    """Yield the keys in what a terminal sent: arrows are several characters."""
    return iter(_KEY.findall(typed))


def order(models: Sequence[ModelLine], sort: Sort) -> list[ModelLine]:
    """Return the models as they are shown; what is largest comes first, but for names."""
    return sorted(models, key=_ORDERS[sort])


def chosen_name(choices: Choices, names: Sequence[str]) -> str:
    """Return the name that is chosen among those shown; "" where there are none."""
    if choices.chosen in names:
        return choices.chosen
    return names[0] if names else ""


def press(choices: Choices, key: str, names: Sequence[str]) -> tuple[Choices, Action | None]:
    """Return the choices after a key, and what else it asks for. names: as they are shown.

    A key that means nothing changes nothing; while a model is about to be unloaded, every key but
    `y` keeps it. With UNLOAD, `chosen` of what is returned is the model.
    """
    if choices.confirming:
        return _confirm(choices, key)
    choices = replace(choices, note="")
    name = chosen_name(choices, names)
    if key in _MOVES and names:
        place = names.index(name) + _MOVES[key]
        return replace(choices, chosen=names[min(max(place, 0), len(names) - 1)]), None
    match key:
        case "q" | "Q":
            return choices, Action.QUIT
        case "s":
            orders = list(Sort)
            following = orders[(orders.index(choices.sort) + 1) % len(orders)]
            return replace(choices, sort=following), None
        case "u" if name:
            return replace(choices, chosen=name, confirming=name), None
        case _:
            return choices, None


def _confirm(choices: Choices, key: str) -> tuple[Choices, Action | None]:
    name, kept = choices.confirming, replace(choices, confirming="")
    if key in {"y", "Y"}:
        return replace(kept, chosen=name, note=f"unloading {name}"), Action.UNLOAD
    return replace(kept, note=f"{name} stays"), None
