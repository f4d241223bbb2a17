"""The models of a fleet: this machine's own names first, then what nodes alone have."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from mlxd_controller.fleet.catalog import FleetStore
from mlxd_controller.runtime.ports import ModelRef
from mlxd_controller.settings import StorePlaces
from mlxd_controller.store.shelves import library_of
from mlxd_models.files.digest import model_digest
from mlxd_shared.domain.errors import ModelNotFound
from mlxd_shared.domain.requests import LoadSpec
from tests.support.fleets import FAKE, Blind, Followed, follow, nodes_of
from tests.support.made_stores import commit_of, write_hub_model
from tests.support.tiny_model import write_tiny_model

FIXED = LoadSpec(context_length=64)


@pytest_asyncio.fixture
async def seen(tmp_path: Path) -> AsyncIterator[Followed]:
    """Node a has `mine`, another `shared` than the server's, and a twin of that; b has `shared`."""
    for node, name, seed in (("a", "mine", 1), ("a", "shared", 2), ("a", "twin", 9)):
        write_tiny_model(tmp_path / node / name, seed=seed)
    write_tiny_model(tmp_path / "b" / "shared", seed=3)
    async with nodes_of(FAKE) as nodes:
        for name in ("a", "b"):
            nodes.files[name] = Blind(tmp_path / f"copies-{name}", tmp_path / name)
            nodes.add(name)
        async with follow(nodes) as followed:
            yield followed


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """The server's own model, which node a has as `twin`."""
    return write_tiny_model(tmp_path / "here" / "shared", seed=9)


def store_of(seen: Followed, *folders: Path) -> FleetStore:
    """Return the store of a server with these folders."""
    own = library_of(((folder.name, folder) for folder in folders), StorePlaces())
    return FleetStore(own, seen.fleet.nodes, load_defaults={"mine": FIXED})


@pytest.mark.asyncio
async def test_what_is_here_has_its_names(seen: Followed, here: Path, tmp_path: Path) -> None:
    """A node's model of that name has the node's name before it; one of that digest is the same."""
    store = store_of(seen, here)
    listed = await store.list_models()

    assert [ref.name for ref in listed] == ["a:shared", "b:shared", "mine", "shared"]
    assert [ref.machine for ref in listed if isinstance(ref, ModelRef)] == ["a", "b", "a", ""]
    assert (await store.resolve("shared")).path == here
    for node in ("a", "b"):
        digest = model_digest(tmp_path / node / "shared")
        known = await store.resolve(f"{node}:shared")
        assert (known.digest, known.machine) == (digest, node)
    assert (await store.resolve("a:mine")).name == "mine"
    assert (await store.resolve("twin")).name == "shared"


@pytest.mark.asyncio
async def test_of_two_nodes_with_one_name_the_first_has_it(seen: Followed, tmp_path: Path) -> None:
    """The other model is reached by its node's name."""
    store = store_of(seen)
    assert (await store.resolve("shared")).digest == model_digest(tmp_path / "a" / "shared")
    assert (await store.resolve("b:shared")).digest == model_digest(tmp_path / "b" / "shared")


@pytest.mark.asyncio
async def test_a_model_has_the_names_of_all_its_nodes(tmp_path: Path) -> None:
    """One that the first node has fetched by its commit keeps the name that it had before."""
    folder, commit = write_tiny_model(tmp_path / "tiny"), commit_of("1")
    async with nodes_of(FAKE) as nodes:
        for name, refs in (("a", ()), ("b", ("main",))):
            hub = tmp_path / name
            write_hub_model(hub, "o/m", folder, commit=commit, refs=refs)
            nodes.files[name] = Blind(tmp_path / f"copies-{name}", hub=hub)
            nodes.add(name)
        async with follow(nodes) as followed:
            store = store_of(followed)
            (ref,) = await store.list_models()
            assert (ref.name, ref.path.name) == ("o/m", commit)
            assert isinstance(ref, ModelRef)
            assert ref.aliases == (f"o/m@{commit}", f"a:o/m@{commit}", "b:o/m")
            for name in (ref.name, *ref.aliases):
                assert await store.resolve(name) == ref


@pytest.mark.asyncio
async def test_a_digest_is_a_name_and_defaults_apply(seen: Followed, tmp_path: Path) -> None:
    """As of this machine's models."""
    digest = model_digest(tmp_path / "a" / "mine")
    store = store_of(seen)
    assert store.find_known(digest) is None
    ref = await store.resolve(digest[:12])
    assert (ref.digest, ref.name, ref.aliases) == (digest, "mine", ("a:mine",))
    assert ref.configured == FIXED
    assert store.find_known(digest) == ref


@pytest.mark.asyncio
async def test_a_node_describes_what_ranks_have_of_its_models(seen: Followed) -> None:
    """Where the files are, when somebody needs it; what was described outlives a listing."""
    store, calls = store_of(seen), seen.nodes.handles["a"].calls
    facts = (await store.resolve("mine")).facts
    assert "describe_ranks" not in calls
    for _ in range(2):
        await facts.division.describe()
        store._due_s = 0.0
        facts = (await store.resolve("mine")).facts
    assert calls.count("describe_ranks") == 1
    assert facts.of_ranks(2).elements < facts.elements

    far = (await store.resolve("b:shared")).facts.division
    seen.node("b").lose("cut")
    await far.describe()
    assert "no machine that has the model" in far.problem


@pytest.mark.asyncio
async def test_what_a_lost_node_has_said_stays_known(seen: Followed) -> None:
    """It may have been copied; a node that was never heard has nothing."""
    store, handles = store_of(seen), seen.nodes.handles
    handles["b"].cut()
    await handles["a"].until(lambda: seen.node("b").lost)
    before = [ref.name for ref in await store.list_models()]
    assert before == ["mine", "shared", "twin"]

    handles["a"].cut()
    seen.node("a").lose("cut")
    assert isinstance(await store.resolve("mine"), ModelRef)
    for handle in handles.values():
        handle.mend()


@pytest.mark.asyncio
async def test_names_that_nobody_has_ask_no_node_again_and_again(seen: Followed) -> None:
    """Whoever asks for many unknown names costs the nodes one listing in a while."""
    store = store_of(seen)
    for number in range(20):
        with pytest.raises(ModelNotFound):
            await store.resolve(f"unknown-{number}")
    assert seen.nodes.handles["a"].calls.count("list_models") <= 2
