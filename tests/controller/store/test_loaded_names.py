"""Names that loads gave: bounded by folder and in all; what nobody needs makes room."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path

import pytest

from mlxd.v1 import model_pb2
from mlxd_controller.core import phases
from mlxd_controller.settings import StorePlaces
from mlxd_controller.store.aliases import set_alias
from mlxd_controller.store.loaded_names import LoadedNames
from mlxd_controller.store.model_library import Library
from mlxd_controller.store.shelves import library_of
from mlxd_shared.config import FOLDER_NAMES_MAX, LOADED_NAMES_MAX, MODELS_MAX
from mlxd_shared.domain.errors import InvalidRequest, ModelNotFound, QueueFull
from tests.support.calls import error_of
from tests.support.controller_stack import Stack, controller_stack
from tests.support.tiny_model import write_tiny_model


def never(_name: str, _path: Path) -> bool:
    """Nobody needs a name."""
    return False


def full(count: int = LOADED_NAMES_MAX) -> LoadedNames:
    """Return so many names, n0 used longest ago, each of a folder of its own."""
    names = LoadedNames()
    for index in range(count):
        assert names.give(f"n{index}", Path(f"/m/{index}"), needed=never) is None
    return names


def test_a_folder_has_so_many_names_and_no_more() -> None:
    """The error names the field and the limit; the names that there are, and other folders, go on;
    a name that was forgotten makes room."""
    names, folder = LoadedNames(), Path("/m")
    for index in range(FOLDER_NAMES_MAX):
        names.give(f"n{index}", folder, needed=never)
    with pytest.raises(InvalidRequest, match=f"at most {FOLDER_NAMES_MAX}") as caught:
        names.give("more", folder, needed=never)
    assert caught.value.violations[0].field == "name"
    assert names.give("n0", folder, needed=never) is None
    assert names.give("other", Path("/other"), needed=never) is None

    del names["n0"]
    names.give("more", folder, needed=never)
    own = {name for name, place in names.items() if place == folder}
    assert own == {"more", *(f"n{i}" for i in range(1, FOLDER_NAMES_MAX))}


def test_the_name_used_longest_ago_makes_room() -> None:
    """A name that is given again, or asked for, is as new; what is needed is passed over."""
    names = full()
    names.use("n0")
    names.use("nobody")
    names.give("n1", Path("/m/1"), needed=never)
    forgotten = names.give("new", Path("/m/new"), needed=lambda name, _: name in {"n2", "n3"})

    assert forgotten == "n4"
    assert "n4" not in names
    assert {"n0", "n1", "n2", "n3", "new"} <= names.keys()
    assert len(names) == LOADED_NAMES_MAX


def test_where_all_are_needed_a_new_name_is_refused() -> None:
    """None of them is lost by it."""
    names = full()
    with pytest.raises(QueueFull, match=str(LOADED_NAMES_MAX)):
        names.give("new", Path("/new"), needed=lambda _name, _path: True)
    assert dict(names) == dict(full())


def test_a_name_is_never_taken_from_another_folder() -> None:
    """However many loads come at once."""
    names = full(2)
    with pytest.raises(InvalidRequest, match="another folder"):
        names.give("n0", Path("/m/1"), needed=never)
    assert names["n0"] == Path("/m/0")


def test_loads_leave_room_for_models_that_stores_have() -> None:
    """Their names never fill the list of models."""
    assert LOADED_NAMES_MAX + FOLDER_NAMES_MAX < MODELS_MAX


@pytest.mark.asyncio
async def test_names_of_one_folder_keep_nobody_from_loading(tmp_path: Path) -> None:
    """Once they could take all the room that there is, for ever."""
    one, two = (write_tiny_model(tmp_path / name, seed=i) for i, name in enumerate(("one", "two")))
    library = Library(())
    refused = 0
    for index in range(2 * FOLDER_NAMES_MAX):
        try:
            await library.add(one, name=f"n{index}")
        except InvalidRequest:
            refused += 1
    assert refused == FOLDER_NAMES_MAX
    assert (await library.add(two, name="")).name == "two"


@pytest.mark.asyncio
async def test_what_is_forgotten_is_no_name_any_more(tmp_path: Path) -> None:
    """Not of its model either, which keeps the others; the next load may give it to any folder."""
    one, two = (write_tiny_model(tmp_path / name, seed=i) for i, name in enumerate(("one", "two")))
    library = Library([("fixed", one)])
    digest = (await library.add(one, name="a")).digest
    await library.add(one, name="b")
    assert await library.forget("a") == ("b", "fixed")
    with pytest.raises(ModelNotFound):
        await library.resolve("a")
    known = library.find_known(digest)
    assert known is not None
    assert (known.name, known.aliases) == ("b", ("fixed",))
    assert (await library.resolve("b")).aliases == ("fixed",)
    assert [ref.name for ref in await library.list_models()] == ["b"]
    assert (await library.add(two, name="a")).digest != digest


@pytest.mark.asyncio
async def test_only_what_a_load_gave_is_forgotten(tmp_path: Path) -> None:
    """A name of other origin is refused with where it comes from; one that nobody has is not
    found."""
    write_tiny_model(tmp_path / "models" / "stored", seed=1)
    set_alias(tmp_path / "models", "other", "stored")
    folder = write_tiny_model(tmp_path / "folder", seed=2)
    library = library_of([("fixed", folder)], StorePlaces(tmp_path / "models", None, None))
    origins = {"fixed": "stays until the server ends", "other": "alias", "stored": "store models"}
    for name, words in origins.items():
        with pytest.raises(InvalidRequest, match=words):
            await library.forget(name)
        await library.resolve(name)
    with pytest.raises(ModelNotFound):
        await library.forget("nobody")


def copies(folder: Path, place: Path, count: int) -> list[Path]:
    """Return copies of a model that are models of their own."""
    folders = [place / str(index) for index in range(count)]
    for copy in folders:
        shutil.copytree(folder, copy)
        config = json.loads((copy / "config.json").read_text())
        (copy / "config.json").write_text(json.dumps({**config, "copy": copy.name}))
    return folders


async def fill(library: Library, folders: list[Path], left: int = LOADED_NAMES_MAX) -> None:
    """Give the folders so many names: 0-0, 0-1, ..., 1-0, ..."""
    for folder in folders:
        for number in range(min(FOLDER_NAMES_MAX, left)):
            await library.add(folder, name=f"{folder.name}-{number}")
            left -= 1


@pytest.mark.asyncio
async def test_names_make_room_but_for_those_in_use_or_meant_by_an_alias(tmp_path: Path) -> None:
    """A model in use keeps all its names, whether it is known by its digest or by its path."""
    folder = write_tiny_model(tmp_path / "new")
    folders = copies(folder, tmp_path / "copies", LOADED_NAMES_MAX // FOLDER_NAMES_MAX)
    set_alias(tmp_path / "models", "short", "2-1")
    library = library_of((), StorePlaces(tmp_path / "models", None, None))
    await fill(library, folders)
    in_use = (str(folders[0]), (await library.inspect(folders[1], name="")).digest)
    for name in ("one", "two"):
        await library.add(folder, name=name, in_use=lambda: in_use)

    for gone in ("2-0", "2-2"):
        with pytest.raises(ModelNotFound):
            await library.resolve(gone)
    for kept in ("0-0", "0-7", "1-0", "1-7", "2-1", "2-3", "short", "one", "two"):
        await library.resolve(kept)


async def load(stack: Stack, path: Path, name: str) -> None:
    """Load a folder under a name."""
    async for _ in stack.models.LoadModel(model_pb2.LoadModelRequest(model=str(path), name=name)):
        pass


async def forget(stack: Stack, name: str) -> tuple[str, ...]:
    """Have a name forgotten, and return those that are left."""
    request = model_pb2.ForgetModelRequest(name=name)
    return tuple((await stack.models.ForgetModel(request)).names)


@pytest.mark.asyncio
async def test_a_model_in_use_keeps_its_last_name(tmp_path: Path) -> None:
    """Others of it may go, while it serves on; unloaded, the last one may go too."""
    folder = write_tiny_model(tmp_path / "m")
    async with controller_stack(store=Library(())) as stack:
        await load(stack, folder, "a")
        await load(stack, folder, "b")
        assert await forget(stack, "a") == ("b",)
        request = model_pb2.ForgetModelRequest(name="b")
        error = await error_of(stack.models.ForgetModel(request))
        assert isinstance(error, InvalidRequest)
        assert "unload it first" in error.describe()
        assert await stack.generate("b")

        await stack.models.UnloadModel(model_pb2.UnloadModelRequest(model="b"))
        assert await forget(stack, "b") == ()
        gone = stack.models.GetModel(model_pb2.GetModelRequest(model="b"))
        assert isinstance(await error_of(gone), ModelNotFound)


@pytest.mark.asyncio
async def test_a_load_forgets_no_name_of_a_model_that_is_loaded_or_loading(tmp_path: Path) -> None:
    """Though they are the oldest: the two that are in use stay, the third one goes."""
    library = Library(())
    folder = write_tiny_model(tmp_path / "m")
    first, second, last, *others = copies(
        folder, tmp_path / "copies", LOADED_NAMES_MAX // FOLDER_NAMES_MAX + 3
    )
    async with controller_stack(store=library) as stack:
        await load(stack, first, "ready")
        stack.workers.script.load_gate.clear()
        loading = asyncio.create_task(load(stack, second, "loading"))
        await stack.until("loading", phases.Loading)
        await fill(library, others, LOADED_NAMES_MAX - 2)
        stack.workers.script.load_gate.set()
        await load(stack, last, "last")
        await loading

        for name in ("ready", "loading", "last", f"{others[0].name}-1"):
            await library.resolve(name)
        with pytest.raises(ModelNotFound):
            await library.resolve(f"{others[0].name}-0")


@pytest.mark.asyncio
async def test_asking_for_a_model_keeps_its_name(tmp_path: Path) -> None:
    """Also one that is loaded, whose files nobody looks at then: unloaded, it is not the oldest."""
    library = Library(())
    folder = write_tiny_model(tmp_path / "m")
    first, last, *others = copies(
        folder, tmp_path / "copies", LOADED_NAMES_MAX // FOLDER_NAMES_MAX + 2
    )
    async with controller_stack(store=library) as stack:
        await load(stack, first, "asked")
        await fill(library, others, LOADED_NAMES_MAX - 1)
        assert await stack.generate("asked")
        await stack.models.UnloadModel(model_pb2.UnloadModelRequest(model="asked"))
        await load(stack, last, "last")
        await library.resolve("asked")
