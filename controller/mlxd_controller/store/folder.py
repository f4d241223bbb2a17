"""A model's folder to what plans reckon with, or the reason why no worker could load it.

Invariants:
- What describes a model here describes it for the worker that loads it. No weights are read but the
  digest's samples: a folder of any size takes milliseconds.
- A model is read again only when one of its files has changed (name, size or time of change), on a
  thread, each model by one at a time.
- An error is kept without what led to it: that would hold on to all that was being read.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from mlxd_controller.runtime.ports import ModelRef
from mlxd_controller.store.shelf import Place
from mlxd_models.describe import describe
from mlxd_models.families.common.family import Family
from mlxd_models.families.foreign import FOREIGN
from mlxd_models.files.chat_template import read_template
from mlxd_models.files.digest import model_digest
from mlxd_models.files.generation_defaults import read_generation_defaults
from mlxd_models.files.model_config import check_tokenizer_file
from mlxd_models.files.model_source import Source, files_of
from mlxd_models.files.modules import check_modules, has_pooling
from mlxd_models.files.stored_files import Signature
from mlxd_models.fit.described import facts_of, taken_of
from mlxd_models.fit.facts import ModelFacts
from mlxd_shared.config import MODELS_MAX
from mlxd_shared.domain.errors import InvalidModel
from mlxd_shared.domain.requests import SamplingOptions
from mlxd_shared.wire.status import shorten

READINGS_MAX = 4 * MODELS_MAX
"""Of places, the latest: clients may have any folder looked at."""


@dataclass(frozen=True, slots=True)
class Folder:
    """What reading a model gave."""

    digest: str
    facts: ModelFacts
    defaults: SamplingOptions
    has_pooling: bool
    """Whether they say how texts become vectors."""
    has_chat_template: bool


def ref_of(place: Place, folder: Folder, names: Sequence[str] = ()) -> ModelRef:
    """Return the model of a place under `names`, or under the place's own."""
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
    )


def read_folder(source: Source, *, foreign: Family[Any] = FOREIGN) -> Folder:
    """Return a model's digest and facts. Blocks on the disk.

    foreign: what describes models that mlx-lm alone has an architecture for.

    Raises:
        InvalidModel: no worker could load it: its config, generation_config.json or tensors cannot
            be served, there is no tokenizer, its chat template cannot be read, or a file that
            another one names is missing.
    """
    files = files_of(source)
    check_modules(files)
    described = describe(files, foreign=foreign)
    check_tokenizer_file(files)
    template = read_template(files)
    facts = replace(facts_of(described), taken=taken_of(described))
    defaults = read_generation_defaults(files)
    return Folder(model_digest(files), facts, defaults, has_pooling(files), template is not None)


@dataclass(frozen=True, slots=True)
class Entry:
    """A model as it was when its signature was taken: read, or broken."""

    signature: Signature
    folder: Folder | None = None
    error: InvalidModel | None = None

    @property
    def digest(self) -> str | None:
        """The identity, where it could be read."""
        return None if self.folder is None else self.folder.digest


class Readings:
    """Entries by path. Used from the event loop."""

    def __init__(self, foreign: Family[Any] = FOREIGN) -> None:
        """Have read nothing yet; `foreign` as `read_folder` has it."""
        self._foreign = foreign
        self._entries: dict[Path, Entry] = {}
        self._turns: WeakValueDictionary[Path, asyncio.Lock] = WeakValueDictionary()

    def last(self, path: Path) -> Entry | None:
        """Return what was last read there."""
        return self._entries.get(path)

    async def read(self, path: Path) -> Entry:
        """Return what is there now."""
        async with self._turns.setdefault(path, asyncio.Lock()):
            entry = await asyncio.to_thread(_read, path, self._entries.get(path), self._foreign)
            self._entries.pop(path, None)
            self._entries[path] = entry
            while len(self._entries) > READINGS_MAX:
                del self._entries[next(iter(self._entries))]
            return entry

    async def read_good(self, path: Path) -> Folder:
        """Return what is there now; raises what keeps it from being served."""
        entry = await self.read(path)
        if entry.error is not None:
            raise replace(entry.error)
        assert entry.folder is not None
        return entry.folder


def _read(path: Path, before: Entry | None, foreign: Family[Any]) -> Entry:
    try:
        files = files_of(path)
        signature = files.signature()
    except InvalidModel as error:
        return Entry((), error=_shorten(error))
    if before is not None and before.signature == signature and signature:
        return before
    try:
        return Entry(signature, read_folder(files, foreign=foreign))
    except InvalidModel as error:
        return Entry(signature, error=_shorten(error))


def _shorten(error: InvalidModel) -> InvalidModel:
    """Return an error as it is kept and listed: what a file says in it may have any length."""
    return InvalidModel(shorten(error.problem), shorten(error.file), shorten(error.field))
