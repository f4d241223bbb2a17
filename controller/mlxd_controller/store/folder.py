"""Reads a model's folder into the facts that plans use, or the reason why no worker can load it.

Invariants:
- The description read here is also the one that the worker loads by. Of the weights only the
  digest's samples are read: a folder of any size takes milliseconds.
- A model is read again only when one of its files has changed (name, size or modification time), on
  a thread, and by one reader at a time.
- What ranks have of a model is described when somebody plans ranks for it, from its files again.
- An error is kept without its cause, which would keep everything that was read alive.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from mlxd_controller.runtime.describing import LaterDivision
from mlxd_controller.runtime.ports import HubOrigin, ModelRef
from mlxd_controller.store.hub import origin_of
from mlxd_controller.store.shelf import Place
from mlxd_models.describe import Description, describe
from mlxd_models.families.common.family import Family
from mlxd_models.families.foreign import FOREIGN
from mlxd_models.files.chat_template import read_template
from mlxd_models.files.digest import model_digest
from mlxd_models.files.generation_defaults import read_generation_defaults
from mlxd_models.files.image_settings import read_image_settings
from mlxd_models.files.model_config import check_tokenizer_file
from mlxd_models.files.model_source import Source, files_of
from mlxd_models.files.modules import check_modules, has_pooling
from mlxd_models.files.stored_files import Signature
from mlxd_models.fit.facts import ModelFacts, Parts
from mlxd_models.fit.rank_facts import parts_of_ranks, whole_facts
from mlxd_shared.config import MODELS_MAX
from mlxd_shared.domain.errors import InvalidModel
from mlxd_shared.domain.requests import SamplingOptions
from mlxd_shared.ops.logs import get_logger
from mlxd_shared.wire.status import shorten

_log = get_logger("store")
DescribeParts = Callable[[Description], Parts]

READINGS_MAX = 4 * MODELS_MAX
"""How many readings are kept, the latest ones: clients may name any folder."""


@dataclass(frozen=True, slots=True)
class Folder:
    """The result of reading a model."""

    digest: str
    facts: ModelFacts
    defaults: SamplingOptions
    has_pooling: bool
    """Whether its files say how to pool its texts into vectors."""
    has_chat_template: bool
    origin: HubOrigin | None


def ref_of(place: Place, folder: Folder, names: Sequence[str] = ()) -> ModelRef:
    """Return the model at a place, under `names` or under the place's own name."""
    name, *aliases = names or (place.name,)
    return ModelRef(
        digest=folder.digest,
        name=name,
        aliases=tuple(aliases),
        path=place.path,
        facts=folder.facts,
        defaults=folder.defaults,
        store=place.kind,
        has_pooling=folder.has_pooling,
        has_chat_template=folder.has_chat_template,
        origin=folder.origin,
    )


def read_folder(
    source: Source,
    *,
    foreign: Family[Any] = FOREIGN,
    describe_parts: DescribeParts = parts_of_ranks,
) -> Folder:
    """Return a model's digest and facts. Blocks on the disk.

    foreign: describes models that only mlx-lm implements. describe_parts: returns what ranks have
    of a model, when that is needed.

    Raises:
        InvalidModel: no worker could load it: its config, generation_config.json or tensors cannot
            be served, it has no tokenizer, its chat template cannot be read, it sees and does not
            say how images are made ready, or a file named by another file is missing.
    """
    files = files_of(source)
    check_modules(files)
    described = describe(files, foreign=foreign)
    check_tokenizer_file(files)
    template, sight = read_template(files), described.footprint.sight
    if sight is not None:
        read_image_settings(
            files, side=sight.side, places_max=sight.places_max, tokens=sight.tokens_each
        )
    if described.unseeing:
        _log.warning("images are not seen", path=str(files.path), reason=described.unseeing)
    read = partial(_read_parts, files.path, files.signature(), foreign, describe_parts)
    division = LaterDivision(partial(asyncio.to_thread, read))
    facts = replace(whole_facts(described), division=division)
    defaults = read_generation_defaults(files)
    return Folder(
        digest=model_digest(files),
        facts=facts,
        defaults=defaults,
        has_pooling=has_pooling(files),
        has_chat_template=template is not None,
        origin=origin_of(files),
    )


def _read_parts(
    path: Path, signature: Signature, foreign: Family[Any], describe_parts: DescribeParts
) -> Parts:
    """Return what ranks have of a model that was read before.

    Raises:
        InvalidModel: it cannot be read any more, or its files have changed.
        MachineShort: the machine lacks the open files or memory for it.
    """
    try:
        files = files_of(path)
        if files.signature() == signature:
            return describe_parts(describe(files, foreign=foreign))
    except InvalidModel as error:
        raise _shorten(error) from None
    raise InvalidModel("the model's files have changed since they were read")


@dataclass(frozen=True, slots=True)
class Entry:
    """A model as it was when its signature was taken: read, or broken."""

    signature: Signature
    folder: Folder | None = None
    error: InvalidModel | None = None

    @property
    def digest(self) -> str | None:
        """Its digest, if it could be read."""
        return None if self.folder is None else self.folder.digest

    @property
    def whole(self) -> bool:
        """Whether nothing is missing because it could not be read when it was needed."""
        return self.folder is None or not self.folder.facts.division.problem


class Readings:
    """Entries by path. Used from the event loop."""

    def __init__(
        self, foreign: Family[Any] = FOREIGN, describe_parts: DescribeParts = parts_of_ranks
    ) -> None:
        self._read_folder = partial(read_folder, foreign=foreign, describe_parts=describe_parts)
        self._entries: dict[Path, Entry] = {}
        self._turns: WeakValueDictionary[Path, asyncio.Lock] = WeakValueDictionary()

    def last(self, path: Path) -> Entry | None:
        """Return the last reading of a path."""
        return self._entries.get(path)

    async def read(self, path: Path) -> Entry:
        """Return what is at a path now."""
        async with self._turns.setdefault(path, asyncio.Lock()):
            before = self._entries.get(path)
            entry = await asyncio.to_thread(_read, path, before, self._read_folder)
            self._entries.pop(path, None)
            self._entries[path] = entry
            while len(self._entries) > READINGS_MAX:
                del self._entries[next(iter(self._entries))]
            return entry

    async def read_good(self, path: Path) -> Folder:
        """Return the model at a path now; raise the reason if it cannot be served."""
        entry = await self.read(path)
        if entry.error is not None:
            raise replace(entry.error)
        assert entry.folder is not None
        return entry.folder


def _read(path: Path, before: Entry | None, read: Callable[[Source], Folder]) -> Entry:
    try:
        files = files_of(path)
        signature = files.signature()
    except InvalidModel as error:
        return Entry((), error=_shorten(error))
    if before is not None and before.signature == signature and signature and before.whole:
        return before
    try:
        return Entry(signature, read(files))
    except InvalidModel as error:
        return Entry(signature, error=_shorten(error))


def _shorten(error: InvalidModel) -> InvalidModel:
    """Return an error as it is kept: the texts of files in it may have any length."""
    return InvalidModel(shorten(error.problem), shorten(error.file), shorten(error.field))
