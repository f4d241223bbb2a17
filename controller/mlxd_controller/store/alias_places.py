"""What aliases lead to, also while their file cannot be read.

Invariants:
- A file that is damaged, or on a disk that fails, hides no model of another place: it is listed
  under its own name with its error, and whoever asks for a name that is found nowhere else, and so
  may be an alias, is told of it.
- While it cannot be read nobody takes an alias's target for a name that no alias means.
- What the whole machine lacks, such as open files, is raised: no other place can be read then.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from mlxd_controller.runtime.ports import StoreKind
from mlxd_controller.store.aliases import ALIASES_FILE, read_aliases
from mlxd_controller.store.listing import OF_THE_DISK
from mlxd_controller.store.shelf import Place
from mlxd_shared.domain.errors import InvalidModel, MachineShort, MlxdError, ModelNotFound

Unreadable = InvalidModel | MachineShort


class AliasPlaces:
    """The aliases in a directory, as they are whenever somebody asks. Blocks on the disk."""

    def __init__(self, folder: Path | None) -> None:
        """Take the directory; None: there are no aliases."""
        self._folder = folder

    def places(
        self, lead: Callable[[str], Place | None], wanted: str | None = None
    ) -> dict[str, Place]:
        """Return what aliases lead to, all or the one that is wanted.

        lead: returns what is under a name that is no alias.

        Raises:
            MachineShort: the machine lacks what it takes to look anywhere.
        """
        if self._folder is None:
            return {}
        aliases = self._read()
        if not isinstance(aliases, Mapping):
            return {ALIASES_FILE: self._broken_place(ALIASES_FILE, aliases)}
        places: dict[str, Place] = {}
        for alias, target in aliases.items():
            if wanted in (None, alias):
                dangling = ModelNotFound(alias, f"it is an alias of {target}, which is not there")
                places[alias] = lead(target) or self._broken_place(alias, dangling)
        return places

    def check_is_none(self, name: str) -> None:
        """Raise why it is not known whether a name is an alias, if it is not.

        Raises:
            InvalidModel, MachineShort: the aliases cannot be read; names their file.
        """
        aliases = self._read()
        if not isinstance(aliases, Mapping):
            raise _extend_error(aliases, f"{name!r} may be an alias there")

    def targets(self) -> frozenset[str] | Unreadable:
        """Return what aliases mean, or why that is not known: any name may be one of them."""
        try:
            aliases = self._read()
        except MachineShort as short:
            aliases = short
        if isinstance(aliases, Mapping):
            return frozenset(aliases.values())
        return _extend_error(aliases, "until it can be read, no name is forgotten for another")

    def _read(self) -> Mapping[str, str] | Unreadable:
        if self._folder is None:
            return {}
        try:
            return read_aliases(self._folder)
        except InvalidModel as error:
            return replace(error)  # without what led to it, which holds the file
        except MachineShort as short:
            cause = short.__cause__
            if isinstance(cause, OSError) and cause.errno in OF_THE_DISK:
                return replace(short)
            raise

    def _broken_place(self, name: str, error: MlxdError) -> Place:
        assert self._folder is not None
        return Place(name, self._folder / ALIASES_FILE, StoreKind.MODELS, error)


def _extend_error(error: Unreadable, words: str) -> Unreadable:
    """Return an error that says more."""
    if isinstance(error, InvalidModel):
        return replace(error, problem=f"{error.problem}; {words}")
    return replace(error, doing=f"{error.doing}; {words}")
