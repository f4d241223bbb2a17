"""aliases.json in mlxd's own directory of models: other names for models of any store.

    {"version": 1, "aliases": {"small": "org/name", "work": "org/name@v2", "claude-*": "org/name"}}

Invariants:
- A name ending with `*` is a pattern: it stands for every name with that beginning that nothing
  else has. The longest matching pattern counts. Patterns are not names, and not listed as places.
- The file is read whole or refused whole, and replaced atomically, by one writer at a time.
- An alias means a model, never another alias.
- A damaged file, or one on a failing disk, hides no model of another store: it is listed under its
  own name with its error, and a request for a name found nowhere else, which may be an alias, fails
  with that error. Until it can be read no name is forgotten, because it may be a target.
- A shortage of the whole machine, such as of open files, is raised: no store can be read then.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from mlxd_controller.runtime.ports import StoreKind
from mlxd_controller.store.names_file import VERSION, parse_names
from mlxd_controller.store.naming import WILD, is_pattern, match_pattern
from mlxd_controller.store.shelf import OF_THE_DISK, Place, check_name, is_name
from mlxd_models.files.model_files import file_error, read_file
from mlxd_shared.config import ALIASES_MAX, CONFIG_FILE_BYTES_MAX
from mlxd_shared.domain import errors as e
from mlxd_shared.ops.state_file import replace_json, writing_alone

ALIASES_FILE = "aliases.json"
_LOCK_FILE = ".aliases.lock"
Unreadable = e.InvalidModel | e.MachineShort


def read_aliases(folder: Path) -> Mapping[str, str]:
    """Return what each alias means; nothing if there is no file. Blocks on the disk.

    Raises:
        InvalidModel: the file is damaged; names the alias.
    """
    raw = read_file(folder / ALIASES_FILE, bytes_max=CONFIG_FILE_BYTES_MAX)
    if raw is None:
        return {}
    aliases = parse_names(
        raw, file=ALIASES_FILE, field="aliases", names_max=ALIASES_MAX, may_be=_may_be
    )
    for alias, target in aliases.items():
        if not is_name(target):
            raise e.InvalidModel(f"{target!r:.80} is not a name", ALIASES_FILE, f"{alias:.80}")
        if target in aliases:
            raise e.InvalidModel(f"means {target}, an alias itself", ALIASES_FILE, alias)
    return aliases


def _may_be(text: str) -> bool:
    return is_name(text.removesuffix(WILD))


def set_alias(folder: Path, alias: str, target: str) -> None:
    """Make an alias or a pattern mean a model; the directory is created if need be.

    Raises:
        InvalidRequest: one is not a name, the model is an alias, or aliases mean the alias.
        QueueFull: the maximum number of aliases is reached.
        InvalidModel: the file is damaged, or cannot be written.
    """
    if not is_pattern(alias):
        check_name(alias)
    elif not _may_be(alias):
        problem = f"{alias!r}: a pattern is the beginning of names, with one {WILD} at its end"
        raise e.InvalidRequest.of("alias", problem)
    check_name(target)

    def change(aliases: dict[str, str]) -> None:
        if target == alias:
            raise e.InvalidRequest.of(
                "alias", f"{alias} would mean itself: give the model another name"
            )
        if target in aliases:
            raise e.InvalidRequest.of("model", f"{target} is an alias itself")
        if alias in aliases.values():
            raise e.InvalidRequest.of("alias", f"other aliases mean {alias}")
        if alias not in aliases and len(aliases) >= ALIASES_MAX:
            raise e.QueueFull("aliases", ALIASES_MAX)
        aliases[alias] = target

    _change(folder, change)


def remove_alias(folder: Path, alias: str) -> None:
    """Forget an alias.

    Raises:
        ModelNotFound: there is no such alias.
        InvalidModel: the file is damaged, or cannot be written.
    """

    def change(aliases: dict[str, str]) -> None:
        if aliases.pop(alias, None) is None:
            raise e.ModelNotFound(alias, "there is no such alias")

    _change(folder, change)


def _change(folder: Path, change: Callable[[dict[str, str]], None]) -> None:
    try:
        with writing_alone(folder, _LOCK_FILE):
            aliases = dict(read_aliases(folder))
            change(aliases)
            content = {"version": VERSION, "aliases": dict(sorted(aliases.items()))}
            replace_json(folder / ALIASES_FILE, content)
    except OSError as error:
        raise file_error(error, ALIASES_FILE, doing="cannot be written: ") from error


class AliasPlaces:
    """The aliases in a directory, read afresh at each call. Blocks on the disk."""

    def __init__(self, folder: Path | None) -> None:
        """folder: None means that there are no aliases."""
        self._folder = folder

    def places(
        self, lead: Callable[[str], Place | None], wanted: str | None = None
    ) -> dict[str, Place]:
        """Return where aliases lead, all of them or the one that is wanted.

        lead: returns the place of a name that is not an alias.

        Raises:
            MachineShort: the machine lacks a resource without which nothing can be read.
        """
        if self._folder is None:
            return {}
        aliases = self._read()
        if not isinstance(aliases, Mapping):
            return {ALIASES_FILE: self._broken_place(ALIASES_FILE, aliases)}
        places: dict[str, Place] = {}
        for alias, target in aliases.items():
            if wanted in (None, alias) and not is_pattern(alias):
                places[alias] = self._follow(alias, target, lead)
        return places

    def find_by_pattern(self, name: str, lead: Callable[[str], Place | None]) -> Place | None:
        """Return where the longest pattern that matches a name leads; None if none matches.

        lead: as for `places`.

        Raises:
            InvalidModel, MachineShort: the aliases cannot be read; names their file.
        """
        aliases = self.read_for(name)
        pattern = match_pattern(name, aliases)
        if pattern is None or aliases[pattern] == name:
            return None
        return self._follow(pattern, aliases[pattern], lead)

    def _follow(self, alias: str, target: str, lead: Callable[[str], Place | None]) -> Place:
        dangling = e.ModelNotFound(alias, f"it is an alias of {target}, which is not there")
        return lead(target) or self._broken_place(alias, dangling)

    def targets(self) -> frozenset[str] | Unreadable:
        """Return what aliases mean, or why that is unknown, in which case any name may be one."""
        try:
            aliases = self._read()
        except e.MachineShort as short:
            aliases = short
        if isinstance(aliases, Mapping):
            return frozenset(aliases.values())
        return _extend_error(aliases, "until it can be read, no name is forgotten for another")

    def read_for(self, name: str) -> Mapping[str, str]:
        """Return what each alias means, for a name that may be one of them.

        Raises:
            InvalidModel, MachineShort: the aliases cannot be read; names their file.
        """
        aliases = self._read()
        if not isinstance(aliases, Mapping):
            raise _extend_error(aliases, f"{name!r} may be an alias there")
        return aliases

    def _read(self) -> Mapping[str, str] | Unreadable:
        if self._folder is None:
            return {}
        try:
            return read_aliases(self._folder)
        except e.InvalidModel as error:
            return replace(error)  # without its cause, which keeps the file's content alive
        except e.MachineShort as short:
            cause = short.__cause__
            if isinstance(cause, OSError) and cause.errno in OF_THE_DISK:
                return replace(short)
            raise

    def _broken_place(self, name: str, error: e.MlxdError) -> Place:
        assert self._folder is not None
        return Place(name, self._folder / ALIASES_FILE, StoreKind.MODELS, error)


def _extend_error(error: Unreadable, words: str) -> Unreadable:
    if isinstance(error, e.InvalidModel):
        return replace(error, problem=f"{error.problem}; {words}")
    return replace(error, doing=f"{error.doing}; {words}")
