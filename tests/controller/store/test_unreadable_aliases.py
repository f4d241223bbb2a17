"""Aliases whose file is damaged, or on a disk that fails: what is told, and what goes on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from mlxd_controller.runtime.ports import BrokenRef
from mlxd_controller.settings import StorePlaces
from mlxd_controller.store.aliases import ALIASES_FILE, AliasPlaces, set_alias
from mlxd_controller.store.model_library import Library
from mlxd_controller.store.shelves import library_of
from mlxd_shared.config import LOADED_NAMES_MAX
from mlxd_shared.domain.errors import (
    InvalidModel,
    InvalidRequest,
    MachineShort,
    MlxdError,
    ModelNotFound,
)
from tests.controller.store.test_loaded_names import copies, fill
from tests.support.no_more_files import no_more_files
from tests.support.tiny_model import write_tiny_model


def damage(path: Path) -> None:
    """Leave half of the file."""
    path.write_text("{")


def fail(path: Path) -> None:
    """Have the file open and its reading end with a real EIO."""
    path.unlink()
    path.symlink_to("/proc/self/mem")


TROUBLE = pytest.mark.parametrize(
    ("spoil", "kind"), [(damage, InvalidModel), (fail, MachineShort)], ids=["damaged", "EIO"]
)
Spoil = Callable[[Path], None]


def library_with_alias(root: Path) -> Library:
    """Return a store of "fixed", "stored" and the alias "short" of the latter."""
    folder = write_tiny_model(root / "folder", seed=2)
    write_tiny_model(root / "models" / "stored", seed=1)
    set_alias(root / "models", "short", "stored")
    return library_of([("fixed", folder)], StorePlaces(root / "models", None, None))


@TROUBLE
@pytest.mark.asyncio
async def test_aliases_that_cannot_be_read_hide_no_other_place(
    spoil: Spoil, kind: type[MlxdError], tmp_path: Path
) -> None:
    """All else is found, listed and taken in; what may be an alias is told what cannot be read."""
    library = library_with_alias(tmp_path)
    digest = (await library.resolve("short")).digest
    spoil(tmp_path / "models" / ALIASES_FILE)

    assert (await library.resolve("fixed")).name == "fixed"
    assert (await library.resolve("stored")).digest == digest
    assert (await library.resolve(digest)).digest == digest
    await library.add(write_tiny_model(tmp_path / "new", seed=3), name="given")
    assert await library.forget("given") == ()
    broken, *others = await library.list_models()
    assert isinstance(broken, BrokenRef)
    assert (broken.name, type(broken.error)) == (ALIASES_FILE, kind)
    assert [ref.name for ref in others] == ["fixed", "stored"]
    for name in ("short", "nobody"):
        with pytest.raises(kind, match=f"{ALIASES_FILE}: .*{name}.* may be an alias"):
            await library.resolve(name)


@TROUBLE
@pytest.mark.asyncio
async def test_no_name_is_called_an_alias_since_aliases_cannot_be_read(
    spoil: Spoil, kind: type[MlxdError], tmp_path: Path
) -> None:
    """Who wants one forgotten is told where it comes from, or that this cannot be known now."""
    library = library_with_alias(tmp_path)
    with pytest.raises(InvalidRequest, match="'short' is an alias"):
        await library.forget("short")
    with pytest.raises(ModelNotFound, match="no load has given"):
        await library.forget("nobody")
    spoil(tmp_path / "models" / ALIASES_FILE)
    for name, words in (("stored", "store models"), ("fixed", "stays until the server ends")):
        with pytest.raises(InvalidRequest, match=words):
            await library.forget(name)
    for name in ("short", "nobody"):
        with pytest.raises(kind, match=f"{ALIASES_FILE}: .*{name}.* may be an alias"):
            await library.forget(name)


@TROUBLE
@pytest.mark.asyncio
async def test_no_name_makes_room_while_aliases_cannot_be_read(
    spoil: Spoil, kind: type[MlxdError], tmp_path: Path
) -> None:
    """Any of them may be what an alias means; the file mended, that one stays and another goes."""
    folder = write_tiny_model(tmp_path / "new")
    folders = copies(folder, tmp_path / "copies", LOADED_NAMES_MAX // 8)
    places = StorePlaces(tmp_path / "models", None, None)
    aliases = tmp_path / "models" / ALIASES_FILE
    set_alias(tmp_path / "models", "short", "0-0")
    library = library_of((), places)
    await fill(library, folders)
    spoil(aliases)

    with pytest.raises(kind, match=f"{ALIASES_FILE}: .*no name is forgotten"):
        await library.add(folder, name="one")
    assert (await library.add(folders[0], name="0-0")).path == folders[0]  # which needs no room
    aliases.unlink()
    set_alias(tmp_path / "models", "short", "0-0")
    await library.add(folder, name="one")

    for kept in ("0-0", "short", "0-2", "one"):
        await library.resolve(kept)
    with pytest.raises(ModelNotFound):
        await library.resolve("0-1")


def test_a_machine_that_can_read_nothing_is_said_to_be_short(tmp_path: Path) -> None:
    """Not that a name is none, nor that the file is broken."""
    set_alias(tmp_path, "short", "m")
    aliases = AliasPlaces(tmp_path)
    with no_more_files():
        with pytest.raises(MachineShort, match="open files"):
            aliases.places(lambda _: None, "short")
        with pytest.raises(MachineShort, match="open files"):
            aliases.read_for("short")
        assert isinstance(aliases.targets(), MachineShort)
    assert aliases.targets() == frozenset({"m"})


def test_where_there_is_no_directory_of_aliases_there_are_none() -> None:
    """Neither of a name, nor wrong."""
    aliases = AliasPlaces(None)
    assert aliases.places(lambda _: None) == {}
    assert aliases.targets() == frozenset()
    assert aliases.read_for("any") == {}
