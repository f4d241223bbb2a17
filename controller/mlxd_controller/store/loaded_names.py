"""Names that loads gave to folders: how many there may be, and which one is forgotten for another.

A folder has at most FOLDER_NAMES_MAX of them, all folders together LOADED_NAMES_MAX. At the latter
limit, the least recently used name that nobody needs makes room. A name means one folder until it
is forgotten.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from mlxd_shared import config
from mlxd_shared.domain.errors import InvalidRequest, QueueFull

Needed = Callable[[str, Path], bool]
"""Whether a folder's name must stay."""


class LoadedNames(dict[str, Path]):
    """Folders by name, the least recently used name first; see `give`."""

    def use(self, name: str) -> None:
        """Note a use of a name; other stores' names are ignored."""
        if name in self:
            self[name] = self.pop(name)

    def give(self, name: str, path: Path, *, needed: Needed) -> str | None:
        """Make a name mean a folder, and return the name that was forgotten for it.

        Raises:
            InvalidRequest: the name is another folder's, or the folder has too many names.
            QueueFull: the maximum number of names is reached, and all are needed.
        """
        if self.get(name, path) != path:
            raise InvalidRequest.of("name", f"{name!r} is the name of another folder")
        if name in self:
            self.use(name)
            return None
        others = sorted(known for known, place in self.items() if place == path)
        if len(others) >= config.FOLDER_NAMES_MAX:
            problem = (
                f"loads have given {path} {len(others)} names, at most {config.FOLDER_NAMES_MAX}: "
                f"use one of them, such as {others[0]!r}, or have one forgotten"
            )
            raise InvalidRequest.of("name", problem)
        former = None
        if len(self) >= config.LOADED_NAMES_MAX:
            spare = (known for known, place in self.items() if not needed(known, place))
            former = next(spare, None)
            if former is None:
                raise QueueFull("names given by loads", config.LOADED_NAMES_MAX)
            del self[former]
        self[name] = path
        return former
