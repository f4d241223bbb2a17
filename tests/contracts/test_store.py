"""What every model store must do: over real folders, in memory, and in front of a fleet."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlxd_controller.fleet.catalog import FleetStore
from mlxd_controller.runtime.ports import BrokenRef, ModelRef, ModelStore
from mlxd_controller.store.model_library import Library
from mlxd_models.fit.facts import ModelFacts
from mlxd_shared.domain.errors import (
    InvalidModel,
    InvalidRequest,
    MlxdError,
    ModelNotFound,
)
from tests.fakes.store import FakeStore
from tests.support.model_facts import facts
from tests.support.tiny_model import write_tiny_model

KINDS = ("fake", "folders", "fleet")


def make_store(kind: str, root: Path) -> tuple[ModelStore, dict[str, Path]]:
    """Return a store of "a" and its twin "b", "c" and the broken "x", and all folders by name.

    There is a folder "d" more, which the store does not know.
    """
    names = ("a", "b", "c", "x", "d")
    if kind == "fake":
        broken = InvalidModel("missing", file="config.json")
        content: dict[str, tuple[str, ModelFacts | MlxdError]] = {
            "a": ("digest-a", facts(1)), "b": ("digest-a", facts(1)), "c": ("digest-c", facts(2)),
            "x": ("", broken),
        }  # fmt: skip
        fake = FakeStore(content)
        paths = {name: Path("/models") / name for name in names}
        fake.put(paths["d"], "digest-d", facts(4))
        return fake, paths
    paths = {name: root / name for name in names}
    for name, seed in (("a", 1), ("b", 1), ("c", 2), ("d", 3)):
        write_tiny_model(paths[name], seed=seed)
    paths["x"].mkdir()
    library = Library((name, paths[name]) for name in ("a", "b", "c", "x"))
    return FleetStore(library, {}) if kind == "fleet" else library, paths


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", KINDS)
async def test_names_aliases_and_digests_lead_to_the_model(kind: str, tmp_path: Path) -> None:
    """Two folders of one digest are one model under two names; a digest is a name too."""
    store, _ = make_store(kind, tmp_path)
    await store.list_models()

    first, second, other = [await store.resolve(name) for name in ("a", "b", "c")]

    assert first.digest == second.digest != other.digest
    assert (second.name, second.aliases) == ("a", ("b",))
    assert await store.resolve(first.digest) in (first, second)
    assert store.find_known(other.digest) == other
    assert store.find_known("nobody") is None


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", KINDS)
async def test_every_model_is_listed_once_and_a_broken_one_hides_none(
    kind: str, tmp_path: Path
) -> None:
    """Sorted by name; a broken folder comes with its error."""
    store, _ = make_store(kind, tmp_path)
    listing = await store.list_models()

    assert [ref.name for ref in listing] == ["a", "c", "x"]
    assert isinstance(listing[0], ModelRef)
    assert isinstance(listing[2], BrokenRef)
    assert isinstance(listing[2].error, InvalidModel)


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", KINDS)
async def test_what_is_not_there_is_refused_as_what_it_is(kind: str, tmp_path: Path) -> None:
    """Unknown names, broken folders, missing folders, taken names: each its own error."""
    store, paths = make_store(kind, tmp_path)

    with pytest.raises(ModelNotFound):
        await store.resolve("nobody")
    with pytest.raises(InvalidModel):
        await store.resolve("x")
    with pytest.raises(ModelNotFound):
        await store.add(Path("/nonexistent/folder"), name="")
    with pytest.raises(InvalidRequest, match="another folder"):
        await store.add(paths["d"], name="a")
    with pytest.raises(InvalidRequest, match="name one"):
        store.only_name()


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", KINDS)
async def test_a_folder_is_inspected_without_being_taken_in(kind: str, tmp_path: Path) -> None:
    """inspect tells what add would; only add makes it a model, twice as well as once."""
    store, paths = make_store(kind, tmp_path)

    seen = await store.inspect(paths["d"], name="mine")
    with pytest.raises(ModelNotFound):
        await store.resolve("mine")
    added = await store.add(paths["d"], name="mine")
    again = await store.add(paths["d"], name="mine")

    assert seen == added == again
    assert (await store.resolve("mine")).digest == added.digest
    assert (await store.add(paths["d"], name="")).aliases == ("mine",)


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", KINDS)
async def test_a_name_that_was_given_can_be_forgotten(kind: str, tmp_path: Path) -> None:
    """The folder's others are returned and stay; one of other origin, one that nobody has, and the
    last one of a model in use are refused."""
    store, paths = make_store(kind, tmp_path)
    digest = (await store.add(paths["d"], name="mine")).digest
    await store.add(paths["d"], name="yours")

    assert await store.forget("mine", in_use=lambda: [digest]) == ("yours",)
    for in_use in (digest, str(paths["d"])):
        with pytest.raises(InvalidRequest, match="in use"):
            await store.forget("yours", in_use=lambda text=in_use: [text])  # type: ignore[misc]
    assert (await store.resolve("yours")).digest == digest
    assert await store.forget("yours") == ()
    for name in ("mine", "yours", "nobody"):
        with pytest.raises(ModelNotFound):
            await store.forget(name)
        with pytest.raises(ModelNotFound):
            await store.resolve(name)
    with pytest.raises(InvalidRequest):
        await store.forget("a")


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", KINDS)
async def test_who_listens_is_told_what_is_forgotten(kind: str, tmp_path: Path) -> None:
    """At once; not what is refused, and nothing once the listener has gone."""
    store, paths = make_store(kind, tmp_path)
    forgotten: list[str] = []
    for name in ("mine", "yours"):
        await store.add(paths["d"], name=name)
    with store.telling(forgotten.append):
        await store.forget("mine")
        with pytest.raises(ModelNotFound):
            await store.forget("mine")
        assert forgotten == ["mine"]
    await store.forget("yours")
    assert forgotten == ["mine"]


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", KINDS)
async def test_a_digest_never_leads_to_other_content(kind: str, tmp_path: Path) -> None:
    """A folder whose files have changed is another model: its former digest is not found."""
    store, paths = make_store(kind, tmp_path)
    before = await store.resolve("c")
    assert (await store.resolve(before.digest)).path == paths["c"]
    if isinstance(store, FakeStore):
        store.put(paths["c"], "digest-new", facts(3))
    else:
        write_tiny_model(paths["c"], seed=9)

    with pytest.raises(ModelNotFound):
        await store.resolve(before.digest)
    assert (await store.resolve("c")).digest != before.digest
    assert store.find_known(before.digest) is not None  # what is loaded keeps its name
