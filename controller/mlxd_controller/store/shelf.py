"""What every store of models offers: names, and where the model of each lies."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from mlxd_controller.runtime.ports import StoreKind
from mlxd_shared import config
from mlxd_shared.domain.errors import InvalidRequest, MlxdError

_NAME = re.compile(r"[\w][\w.:@+/-]*")


@dataclass(frozen=True, slots=True)
class Place:
    """A name in a store and what it leads to: a folder or manifest, or what is wrong with it."""

    name: str
    path: Path
    kind: StoreKind
    error: MlxdError | None = None


class Shelf(Protocol):
    """One store. Every method blocks on the disk, and sees it as it is then."""

    @property
    def kind(self) -> StoreKind:
        """Which kind of store it is."""
        ...

    def places(self) -> Iterable[Place]:
        """Return every name of a model that might be served, or that is damaged.

        What is plainly for others (other formats, other kinds of models) is left out.
        """
        ...

    def find(self, name: str) -> Place | None:
        """Return where the model of a name lies, listed or not; None: there is no such name.

        What is wrong with it comes as the place's error.
        """
        ...


def is_name(text: str) -> bool:
    """Return whether a model may be called so."""
    return len(text) <= config.MODEL_NAME_CHARS_MAX and _NAME.fullmatch(text) is not None


def check_name(name: str) -> None:
    """Refuse what no model may be called.

    Raises:
        InvalidRequest: too long, empty, or characters that no name has.
    """
    if not is_name(name):
        limit = f"1 to {config.MODEL_NAME_CHARS_MAX} letters, digits and ._:@+/-"
        raise InvalidRequest.of("name", f"{name!r} is not {limit}")
