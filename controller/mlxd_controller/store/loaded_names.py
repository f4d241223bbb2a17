"""Names that loads gave to folders: how many there may be, and which is forgotten for a new one.

A folder has at most FOLDER_NAMES_MAX of them, all folders together LOADED_NAMES_MAX. Where the
latter is reached, the name that was used longest ago and that nobody needs makes room. A name means
one folder until it is forgotten.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from mlxd_shared import config
from mlxd_shared.domain.errors import InvalidRequest, QueueFull

Needed = Callable[[str, Path], bool]
"""Whether a name of a folder must stay."""


class LoadedNames(dict[str, Path]):
    """Folders by name, the name that was used longest ago first; see `give` and `restore`."""

    def restore(self, names: Mapping[str, Path]) -> None:
        """Take in names that were given before, the oldest first."""
        self.update(names)

    def of(self, path: Path) -> tuple[str, ...]:
        """Return the names of a folder, in alphabetical order."""
        return tuple(sorted(name for name, other in self.items() if other == path))

    def use(self, name: str) -> None:
        """Note that somebody asked for this name now; others' names are no matter of this."""
        if name in self:
            self[name] = self.pop(name)

    def give(self, name: str, path: Path, *, needed: Needed) -> str | None:
        """Have a name mean a folder, and return the name that was forgotten for it.

        Raises:
            InvalidRequest: the name is another folder's, or the folder has as many as may be.
            QueueFull: there are as many as may be, and all are needed.
        """
        if self.get(name, path) != path:
            raise InvalidRequest.of("name", f"{name!r} is the name of another folder")
        if name in self:
            self.use(name)
            return None
        others = self.of(path)
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
