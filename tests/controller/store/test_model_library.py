"""All stores under one roof: who has a name, what an alias means, and one model for one digest."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from mlxd_controller.runtime.ports import BrokenRef, ModelRef, StoreKind
from mlxd_controller.settings import StorePlaces
from mlxd_controller.store.aliases import ALIASES_FILE, read_aliases, remove_alias, set_alias
from mlxd_controller.store.model_library import Library
from mlxd_controller.store.shelves import library_of
from mlxd_shared.config import ALIASES_MAX
from mlxd_shared.domain.errors import InvalidModel, InvalidRequest, ModelNotFound, QueueFull
from tests.support.made_stores import GGUF, OllamaStore, commit_of, write_hub_model
from tests.support.tiny_model import write_tiny_model


@pytest.fixture(name="places")
def all_stores(tmp_path: Path) -> StorePlaces:
    """Stores that have the model of seed 1, and in the hub's that of seed 2 as well."""
    folder = write_tiny_model(tmp_path / "one", seed=1)
    places = StorePlaces(tmp_path / "models", tmp_path / "hub", tmp_path / "ollama")
    write_tiny_model(tmp_path / "models" / "o" / "m", seed=1)
    write_hub_model(tmp_path / "hub", "o/m", write_tiny_model(tmp_path / "two", seed=2),
                    commit=commit_of("2"))  # fmt: skip
    write_hub_model(tmp_path / "hub", "o/one", folder, commit=commit_of("1"))
    store = OllamaStore(tmp_path / "ollama")
    for tag in ("latest", "copy"):
        store.manifest("one", store.layers_of(folder), tag=tag)
    store.manifest("gguf", [store.layer(GGUF, "", b"GGUF")])
    return places


def names(listing: tuple[ModelRef | BrokenRef, ...]) -> dict[tuple[str, ...], str]:
    """Return the stores of models by their names."""
    return {
        (ref.name, *(ref.aliases if isinstance(ref, ModelRef) else ())): str(ref.store)
        for ref in listing
    }


@pytest.mark.asyncio
async def test_names_of_one_digest_are_one_model_across_stores(
    places: StorePlaces, tmp_path: Path
) -> None:
    """The same files in two stores are one model; a name that is taken is told with its store."""
    library = library_of([("mine", tmp_path / "one")], places)
    assert names(await library.list_models()) == {
        ("hub:o/m",): "hub",
        ("mine", "o/m", "o/one"): "folder",
        ("one:copy", "one:latest"): "ollama",
    }
    mine = await library.resolve("mine")
    for name in ("o/m", "o/one", "models:o/m", "hub:o/one"):
        assert (await library.resolve(name)).digest == mine.digest
    other = await library.resolve("hub:o/m")
    assert (other.digest != mine.digest, other.store) == (True, StoreKind.HUB)
    assert (await library.resolve("ollama:one")).aliases == ("one:latest",)
    assert (await library.resolve(other.digest)).name == "hub:o/m"
    assert library.only_name() == "mine"


@pytest.mark.asyncio
async def test_what_comes_while_models_are_listed_breaks_no_listing(tmp_path: Path) -> None:
    """A listing tells what it found; folders that are taken in meanwhile are in the next one."""
    paths = [write_tiny_model(tmp_path / f"m{seed}", seed=seed) for seed in range(12)]
    library = Library((path.name, path) for path in paths[:6])
    listing = asyncio.create_task(library.list_models())
    await asyncio.gather(*(library.add(path, name="") for path in paths[6:]))
    first = await listing
    assert {ref.name for ref in first} >= {path.name for path in paths[:6]}
    assert {ref.name for ref in await library.list_models()} == {path.name for path in paths}


@pytest.mark.asyncio
async def test_what_is_found_needs_no_listing(places: StorePlaces) -> None:
    """A model of a store is served by name at once, also one that came after the start."""
    library = library_of((), places)
    shadowed = await library.resolve("hub:o/m")
    assert shadowed.name == "hub:o/m"
    assert (await library.resolve("o/m")).digest != shadowed.digest
    first = await library.resolve("one")
    assert (first.name, first.store) == ("one:latest", StoreKind.OLLAMA)
    assert library.find_known(first.digest) == first
    assert places.hub_cache is not None
    folder = write_tiny_model(places.hub_cache.parent / "late", seed=9)
    write_hub_model(places.hub_cache, "o/late", folder, commit=commit_of("9"))
    assert (await library.resolve("o/late")).name == "o/late"
    with pytest.raises(InvalidRequest, match="name one"):
        library.only_name()


@pytest.mark.asyncio
async def test_a_name_that_nobody_has_is_told_with_those_that_come_near(
    places: StorePlaces, tmp_path: Path
) -> None:
    """Of every store, whatever was asked for before; what a hub may have is a pull away."""
    hints = {}
    for name in ("ONE", "o/ome", "new/model@v2", "nothing-like-it"):
        with pytest.raises(ModelNotFound) as unknown:
            await library_of([("mine", tmp_path / "one")], places).resolve(name)
        hints[name] = unknown.value.hint
    assert hints == {
        "ONE": "did you mean o/one or one:copy or one:latest?",
        "o/ome": "did you mean o/one or o/m?; `mlxd pull o/ome` downloads it from Hugging Face",
        "new/model@v2": "known: hub:o/m, mine, o/m, o/one, one:copy, one:latest; "
        "`mlxd pull new/model@v2` downloads it from Hugging Face",
        "nothing-like-it": "known: hub:o/m, mine, o/m, o/one, one:copy, one:latest",
    }
    with pytest.raises(ModelNotFound) as unknown:
        await library_of([], StorePlaces()).resolve("o/m")
    assert unknown.value.hint == "none is configured"


@pytest.mark.asyncio
async def test_a_digest_cut_short_is_a_name(places: StorePlaces, tmp_path: Path) -> None:
    """As `mlxd ps` shows it, also to a server that has looked at nothing yet; no shorter."""
    digest = (await library_of([("mine", tmp_path / "one")], places).resolve("mine")).digest
    cut = digest[:12]
    for name in (cut, f"sha256:{cut}", digest, f"sha256:{digest}"):
        assert (await library_of((), places).resolve(name)).digest == digest
    for name in (cut[:11], "sha256:", f"{cut}x", cut[::-1]):
        with pytest.raises(ModelNotFound):
            await library_of((), places).resolve(name)


@pytest.mark.asyncio
async def test_gguf_is_not_listed_and_refused_as_what_it_is(places: StorePlaces) -> None:
    """The error names the format."""
    library = library_of((), places)
    with pytest.raises(InvalidModel, match="GGUF"):
        await library.resolve("gguf")


@pytest.mark.asyncio
async def test_a_damaged_blob_breaks_its_models_alone(places: StorePlaces) -> None:
    """It is listed with its error, which names the blob; the others are as before."""
    library = library_of((), places)
    before = names(await library.list_models())
    assert places.ollama is not None
    blob = max((places.ollama / "blobs").iterdir(), key=lambda path: path.stat().st_size)
    blob.write_bytes(blob.read_bytes()[:-1])
    after = {ref.name: ref for ref in await library.list_models()}
    broken = after["one:latest"]
    assert isinstance(broken, BrokenRef)
    assert isinstance(broken.error, InvalidModel)
    assert (broken.error.file, broken.store) == (blob.name, StoreKind.OLLAMA)
    kept = {name: kind for name, kind in before.items() if kind != "ollama"}
    assert kept.items() <= names(tuple(after.values())).items()


@pytest.mark.asyncio
async def test_an_alias_is_another_name_of_a_model_of_any_store(places: StorePlaces) -> None:
    """It goes before a store's own name; one whose model is not there says so and hides none."""
    folder = places.models_dir
    assert folder is not None
    set_alias(folder, "one", "hub:o/m")
    set_alias(folder, "gone", "o/nobody")
    library = library_of((), places)
    assert (await library.resolve("one")).digest == (await library.resolve("hub:o/m")).digest
    with pytest.raises(ModelNotFound, match="alias of o/nobody"):
        await library.resolve("gone")
    listing = names(await library.list_models())
    assert listing[("gone",)] == "models"
    assert ("hub:o/m", "one") in listing
    (folder / ALIASES_FILE).write_text("{")
    assert (ALIASES_FILE,) in names(await library.list_models())


@pytest.mark.asyncio
async def test_a_name_of_a_store_is_not_taken_for_another_folder(
    places: StorePlaces, tmp_path: Path
) -> None:
    """A load of a path under a name that a store has is refused."""
    library = library_of((), places)
    with pytest.raises(InvalidRequest, match="another folder"):
        await library.add(tmp_path / "two", name="o/m")
    assert isinstance(library, Library)


def test_aliases_are_checked_and_kept(tmp_path: Path) -> None:
    """Set, changed, removed; no chains, no names that are none, and a bound."""
    folder = tmp_path / "models"
    assert read_aliases(folder) == {}
    set_alias(folder, "a", "o/m")
    set_alias(folder, "a", "o/n")
    set_alias(folder, "b", "o/m")
    assert read_aliases(folder) == {"a": "o/n", "b": "o/m"}
    for alias, target in (("c", "a"), ("o/m", "x"), ("c", "c"), ("", "x"), ("a b", "x"), ("c", "")):
        with pytest.raises(InvalidRequest):
            set_alias(folder, alias, target)
    remove_alias(folder, "a")
    with pytest.raises(ModelNotFound):
        remove_alias(folder, "a")
    assert read_aliases(folder) == {"b": "o/m"}
    full = {"version": 1, "aliases": {f"a{index}": "m" for index in range(ALIASES_MAX)}}
    (folder / ALIASES_FILE).write_text(json.dumps(full))
    with pytest.raises(QueueFull):
        set_alias(folder, "more", "m")
    assert {path.name for path in folder.iterdir()} == {ALIASES_FILE, ".aliases.lock"}


@pytest.mark.parametrize(
    "content",
    [
        "[]", "{", '{"version": 2, "aliases": {}}', '{"version": 1, "aliases": []}',
        '{"version": 1, "aliases": {"a": 3}}', '{"version": 1, "aliases": {"a b": "m"}}',
        '{"version": 1, "aliases": {"a": "b", "b": "m"}}', '{"version": 1}',
        '{"version": 1, "aliases": {}, "more": 1}',
    ],
)  # fmt: skip
def test_a_damaged_file_of_aliases_is_refused_and_not_written_over(
    content: str, tmp_path: Path
) -> None:
    """Nobody's names are lost by a new one."""
    (tmp_path / ALIASES_FILE).write_text(content)
    with pytest.raises(InvalidModel) as caught:
        set_alias(tmp_path, "new", "m")
    assert caught.value.file == ALIASES_FILE
    assert (tmp_path / ALIASES_FILE).read_text() == content
