"""The models of all stores: names given to the server, and those that the stores have.

Invariants:
- A name means one model. If stores share a name, the first has it: what was named to the server,
  then aliases, then the shelves in their order. A shelf's model is also KIND:NAME, and listed so if
  another store has its name. Patterns of aliases come last, and are not listed.
- All names of one digest mean one model: the first in alphabetical order is its name, the others
  are aliases.
- A broken model hides no other: it is listed with its error, and refused when requested.
- A name that a load gave outlives the server. It is forgotten when a client says so, or to make
  room for another, unless a model in use or an alias needs it. A name that is forgotten while its
  files are being read is not found.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from mlxd_controller.runtime.ports import BrokenRef, ModelRef, StoreKind
from mlxd_controller.store.aliases import AliasPlaces, Unreadable
from mlxd_controller.store.folder import Entry, Folder, Readings, ref_of
from mlxd_controller.store.folder_paths import existing_folder, resolve_folder
from mlxd_controller.store.load_defaults import LoadDefaults, find_defaults
from mlxd_controller.store.loaded_names import LoadedNames
from mlxd_controller.store.naming import beginning_of_digest, hint_for, only_match
from mlxd_controller.store.remembered import RememberedNames
from mlxd_controller.store.shelf import Place, Shelf, check_name
from mlxd_models.families.common.family import Family
from mlxd_models.families.foreign import FOREIGN
from mlxd_shared import config
from mlxd_shared.domain.errors import (
    InvalidModel,
    InvalidRequest,
    MachineShort,
    ModelNotFound,
    QueueFull,
)
from mlxd_shared.ops.logs import get_logger

REFS_MAX = 4 * config.MODELS_MAX
_log = get_logger("store")


class Library:
    """Implements ports.ModelStore over named folders and shelves."""

    def __init__(
        self,
        models: Iterable[tuple[str, Path]],
        shelves: Sequence[Shelf] = (),
        *,
        aliases: Path | None = None,
        remembered: RememberedNames | None = None,
        load_defaults: LoadDefaults = MappingProxyType({}),
        foreign: Family[Any] = FOREIGN,
    ) -> None:
        """Take the configured names, remembered names, and stores; reads no model.

        aliases: the directory of the alias file. remembered: the file of names that loads gave.
        load_defaults: the configured defaults for loads. foreign: describes models that only mlx-lm
        implements.

        Raises:
            InvalidRequest: a name is given twice, or is not valid; or a path is not text.
            QueueFull: more names than MODELS_MAX.
        """
        self._configured: dict[str, Path] = {}
        self._loaded = LoadedNames()
        self._seen: dict[str, Place] = {}
        self._readings = Readings(foreign)
        self._load_defaults = load_defaults
        self._refs: dict[str, ModelRef] = {}
        self._shelves = tuple(shelves)
        self._aliases = AliasPlaces(aliases)
        self._listeners: list[Callable[[str], None]] = []
        for name, path in models:
            if name in self._configured:
                raise InvalidRequest.of("models", f"the name {name!r} is given twice")
            check_name(name)
            if len(self._configured) >= config.MODELS_MAX:
                raise QueueFull("models", config.MODELS_MAX)
            self._configured[name] = resolve_folder(path)
            self._seen[name] = Place(name, self._configured[name])
        self._remembered = remembered or RememberedNames(None)
        self._remembering = asyncio.Lock()  # keeps the file's changes in the order of the names'
        known = self._remembered.read().items()
        self._loaded.update({n: path for n, path in known if n not in self._configured})
        self._seen.update({name: Place(name, path) for name, path in self._loaded.items()})

    async def resolve(self, name: str) -> ModelRef:
        """Return the model for a name, alias or digest; see the port."""
        self.use(name)
        place = await asyncio.to_thread(self._find, name, self._named)
        if place is not None:
            return await self._ref(place)
        place = await self._find_by_digest(name)
        if place is None:
            place = await asyncio.to_thread(self._find_by_pattern, name, self._named)
        if place is not None:
            return await self._ref(place)
        raise ModelNotFound(name, await asyncio.to_thread(self._hint, name, self._named))

    async def _find_by_digest(self, name: str) -> Place | None:
        """Return the place of the model whose digest is `name` or begins with it, if any."""
        beginning = beginning_of_digest(name)
        if beginning is None:
            return None
        if not any(self._is(place, beginning) for place in self._seen.values()):
            await self.list_models()  # reads what nobody has requested yet
        places = {place.path: place for place in self._seen.values() if self._is(place, beginning)}
        entries = [(place, await self._readings.read(place.path)) for place in places.values()]
        by_digest = {
            entry.digest: place  # matched again: files change
            for place, entry in sorted(entries, key=lambda pair: pair[0].path, reverse=True)
            if entry.digest is not None
        }
        return only_match(name, by_digest)

    def _hint(self, name: str, named: Mapping[str, Path]) -> str:
        """Return a hint about an unknown name; on a thread."""
        known: Iterable[str] = named
        with suppress(MachineShort):  # the hint is then shorter
            known = self._look(named)
        pulls = any(shelf.kind is StoreKind.HUB for shelf in self._shelves)
        return hint_for(name, known, pulls=pulls)

    def only_name(self) -> str:
        """Return the default name: the only one named to the server."""
        named = self._named
        if len(set(named.values())) == 1:
            return min(named)
        raise InvalidRequest.of("model", f"name one: {len(named)} models are configured")

    async def inspect(self, path: Path, *, name: str) -> ModelRef:
        """Return the model of a folder without adding it; see the port."""
        path = await self._check_folder(path, name)
        folder = await self._readings.read_good(path)
        return ref_of(Place(name or path.name, path), folder)

    async def add(
        self, path: Path, *, name: str, in_use: Callable[[], Collection[str]] = tuple
    ) -> ModelRef:
        """Add a folder; see the port. A folder that cannot be served is not added."""
        path = await self._check_folder(path, name)
        await self._readings.read_good(path)
        name = name or path.name
        if name not in self._configured:
            aliased = await asyncio.to_thread(self._aliases.targets)
            async with self._remembering:
                is_new = name not in self._loaded
                former = self._give(name, path, aliased, in_use())
                if is_new:
                    await asyncio.to_thread(self._remembered.put, name, path, instead=former)
        return await self._ref(Place(name, path))

    def use(self, name: str) -> None:
        """Note a request for this name; see the port."""
        self._loaded.use(name)

    async def forget(
        self, name: str, *, in_use: Callable[[], Collection[str]] = tuple
    ) -> tuple[str, ...]:
        """Forget a name that a load gave; see the port."""
        if name not in self._loaded:
            origin = await asyncio.to_thread(self._origin, name, self._named)
            if not origin:
                await asyncio.to_thread(self._aliases.read_for, name)
                raise ModelNotFound(name, "no load has given this name")
            raise InvalidRequest.of("name", f"{name!r} {origin}")
        async with self._remembering:
            left = self._forget(name, in_use())
            await asyncio.to_thread(self._remembered.drop, name)
        return left

    def _forget(self, name: str, needed: Collection[str]) -> tuple[str, ...]:
        """Remove a name that a load gave, and return the folder's remaining names."""
        path = self._loaded.get(name)
        if path is None:
            raise ModelNotFound(name, "the name was forgotten just now")
        left = sorted(other for other, place in self._named.items() if place == path)
        left.remove(name)
        if not left and self._is_in_use(path, needed):
            problem = f"{name!r} is the only name of a model in use: unload it first"
            raise InvalidRequest.of("name", problem)
        del self._loaded[name]
        _log.info("name forgotten", model=name, path=str(path))
        self._unsee(name, needed)
        return tuple(left)

    @contextmanager
    def telling(self, listener: Callable[[str], None]) -> Iterator[None]:
        """Report forgotten names while the body runs; see the port."""
        self._listeners.append(listener)
        try:
            yield
        finally:
            self._listeners.remove(listener)

    async def list_models(self) -> tuple[ModelRef | BrokenRef, ...]:
        """Return every model once, sorted by name."""
        places = await asyncio.to_thread(self._look, self._named)
        for name, path in self._named.items():  # including names given meanwhile
            places.setdefault(name, Place(name, path))
        places = {name: place for name, place in places.items() if not self._is_forgotten(place)}
        self._seen = dict(places)  # others change it while files are read
        listing: dict[str, ModelRef | BrokenRef] = {}
        folders: dict[str, tuple[Folder, list[str]]] = {}
        for name in sorted(places):
            place = places[name]
            entry = None if place.error is not None else await self._read_now(place)
            if entry is not None and entry.folder is not None:
                folders.setdefault(entry.folder.digest, (entry.folder, []))[1].append(name)
                continue
            error = place.error if entry is None else entry.error
            assert error is not None
            listing[name] = BrokenRef(name, place.path, error, place.kind)
        for folder, names in folders.values():
            kept = [name for name in names if not self._is_forgotten(places[name])]
            if kept:
                listing[kept[0]] = self._keep(places[kept[0]], folder, kept)
        return tuple(listing[name] for name in sorted(listing))

    async def _read_now(self, place: Place) -> Entry:
        """Return what is at a place; one that is unreadable now hides no other."""
        try:
            return await self._readings.read(place.path)
        except MachineShort as short:
            return Entry((), error=InvalidModel(f"cannot be read now: {short.describe()}"))

    def find_known(self, digest: str) -> ModelRef | None:
        """Return the model with this digest, as it was last read."""
        return self._refs.get(digest)

    @property
    def _named(self) -> dict[str, Path]:
        """All folders that were named individually, as of now."""
        return {**self._loaded, **self._configured}

    def _look(self, named: Mapping[str, Path]) -> dict[str, Place]:
        """Return every name that exists; on a thread."""
        places = {name: Place(name, path) for name, path in named.items()}
        for alias, place in self._alias_places(named).items():
            places.setdefault(alias, place)
        for shelf in self._shelves:
            for place in shelf.places():
                other = places.get(place.name, place)
                name = place.name if other.path == place.path else f"{shelf.kind}:{place.name}"
                if len(places) >= config.MODELS_MAX:
                    _log.warning("models left out", store=shelf.kind, models_max=config.MODELS_MAX)
                    return places
                places.setdefault(name, place)
        return places

    def _find(self, name: str, named: Mapping[str, Path]) -> Place | None:
        """Return where a name leads now; on a thread."""
        if name in named:
            return Place(name, named[name])
        return self._alias_places(named, name).get(name) or self._find_on_shelf(name)

    def _origin(self, name: str, named: Mapping[str, Path]) -> str:
        """Return where a name comes from if no load gave it; "" if unknown. On a thread."""
        if name in self._configured:
            return "is offered by `mlxd serve` itself, and stays until the server ends"
        if name in self._alias_places(named, name):
            return "is an alias: `mlxd alias --remove` takes it away"
        place = self._find_on_shelf(name)
        return "" if place is None else f"is what the store {place.kind} has"

    def _find_on_shelf(self, name: str) -> Place | None:
        """Return what a shelf has under a name, or under KIND:NAME."""
        for shelf in self._shelves:
            place = shelf.find(name)
            if place is not None:
                return place
        kind, colon, own = name.partition(":")
        matches = (shelf.find(own) for shelf in self._shelves if colon and shelf.kind == kind)
        return next(matches, None)

    def _alias_places(
        self, named: Mapping[str, Path], wanted: str | None = None
    ) -> dict[str, Place]:
        return self._aliases.places(partial(self._find_target, named=named), wanted)

    def _find_by_pattern(self, name: str, named: Mapping[str, Path]) -> Place | None:
        return self._aliases.find_by_pattern(name, partial(self._find_target, named=named))

    def _find_target(self, name: str, *, named: Mapping[str, Path]) -> Place | None:
        return Place(name, named[name]) if name in named else self._find_on_shelf(name)

    async def _ref(self, place: Place) -> ModelRef:
        if place.error is not None:
            raise place.error
        folder = await self._readings.read_good(place.path)
        if place.path not in {known.path for known in self._seen.values()}:
            owner = await asyncio.to_thread(self._find, place.name, self._named)
            mine = owner is not None and owner.path == place.path
            self._check_not_forgotten(place)
            self._seen[place.name if mine else f"{place.kind}:{place.name}"] = place
        self._check_not_forgotten(place)
        digest = folder.digest
        known = sorted(name for name, other in self._seen.items() if self._is(other, digest))
        return self._keep(place, folder, known or [place.name])

    def _keep(self, place: Place, folder: Folder, names: Sequence[str]) -> ModelRef:
        """Keep and return a model under all its names, which are in alphabetical order."""
        configured = find_defaults(self._load_defaults, (*names, folder.digest))
        ref = replace(ref_of(place, folder, names), configured=configured)
        self._refs.pop(folder.digest, None)
        self._refs[folder.digest] = ref
        while len(self._refs) > REFS_MAX:  # drops models whose files have changed since
            del self._refs[next(iter(self._refs))]
        return ref

    def _is(self, place: Place, digest: str) -> bool:
        """Return whether a place's last known digest begins with this one."""
        if place.error is not None or self._is_forgotten(place):
            return False
        entry = self._readings.last(place.path)
        return entry is not None and entry.digest is not None and entry.digest.startswith(digest)

    def _give(
        self,
        name: str,
        path: Path,
        aliased: Collection[str] | Unreadable,
        in_use: Collection[str],
    ) -> str | None:
        """Add a name that a load gives; return the name that was forgotten to make room, if any."""

        def is_needed(known: str, place: Path) -> bool:
            if isinstance(aliased, Unreadable):
                raise aliased
            return known in aliased or self._is_in_use(place, in_use)

        former = self._loaded.give(name, path, needed=is_needed)
        self._seen[name] = Place(name, path)
        if former is not None:
            _log.info("name forgotten", model=former, instead=name)
            self._unsee(former, in_use)
        return former

    def _is_forgotten(self, place: Place) -> bool:
        """Return whether an individually named folder has lost that name meanwhile."""
        named = self._configured.get(place.name) or self._loaded.get(place.name)
        return place.kind is StoreKind.FOLDER and named != place.path

    def _check_not_forgotten(self, place: Place) -> None:
        if self._is_forgotten(place):
            raise ModelNotFound(place.name, "the name was forgotten just now")

    def _unsee(self, name: str, in_use: Collection[str]) -> None:
        """Remove a forgotten name from all models."""
        self._seen.pop(name, None)
        for digest, ref in tuple(self._refs.items()):
            names = (ref.name, *ref.aliases)
            left = tuple(known for known in names if known != name)
            if not left and digest in in_use:
                left = (digest,)
            if not left:
                del self._refs[digest]
            elif left != names:
                self._refs[digest] = replace(ref, name=left[0], aliases=left[1:])
        for listener in self._listeners:
            listener(name)

    def _is_in_use(self, path: Path, in_use: Collection[str]) -> bool:
        entry = self._readings.last(path)
        return str(path) in in_use or (entry is not None and entry.digest in in_use)

    async def _check_folder(self, path: Path, name: str) -> Path:
        """Return the resolved folder if it may be served under `name`."""
        path = await asyncio.to_thread(existing_folder, path)
        name = name or path.name
        check_name(name)
        place = await asyncio.to_thread(self._find, name, self._named)
        if place is not None and place.path != path:
            raise InvalidRequest.of("name", f"{name!r} is the name of another folder")
        return path
