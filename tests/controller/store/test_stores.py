"""The stores' own names: what is listed, what is found, and that nothing leads out of a store."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxd_controller.runtime.ports import StoreKind
from mlxd_controller.store.hub import HubShelf
from mlxd_controller.store.models_dir import ModelsShelf
from mlxd_controller.store.ollama import OllamaShelf
from mlxd_controller.store.shelf import Place, Shelf
from mlxd_shared.domain.errors import InvalidModel
from tests.support.effort import SAME_EACH_TIME, examples
from tests.support.made_stores import GGUF, OllamaStore, commit_of, write_hub_model
from tests.support.tiny_model import write_tiny_model

ODD = (
    "", ".", "..", "../m", "o/..", "o/../m", "/etc", "o/m/x/y", "o//m", "o/m@", "o/m@../x",
    "o/m@/etc", "o\0m", "o/m@refs/../../x", "a b", "m:..", "..:m", "../..:m", "m:", "o/m@v1/../v1",
)  # fmt: skip


@pytest.fixture(name="folder")
def tiny_folder(tmp_path: Path) -> Path:
    """A model."""
    return write_tiny_model(tmp_path / "tiny")


def list_names(shelf: Shelf) -> dict[str, str]:
    """Return each name, and what is wrong with it."""
    return {p.name: "" if p.error is None else p.error.describe() for p in shelf.places()}


def find_place(shelf: Shelf, name: str) -> Place:
    """Return the place of a name that there is."""
    place = shelf.find(name)
    assert place is not None
    return place


def test_a_hubs_revisions_are_models(folder: Path, tmp_path: Path) -> None:
    """main has the bare name, other refs theirs, a commit without one its own; all are found."""
    root, first, second = tmp_path / "hub", commit_of("1"), commit_of("2")
    snapshot = write_hub_model(root, "o/m", folder, commit=first, refs=("main", "v1", "pr/3"))
    write_hub_model(root, "o/m", folder, commit=second, refs=())
    write_hub_model(root, "solo", folder, commit=first)
    shelf = HubShelf(root)

    assert list_names(shelf) == dict.fromkeys(
        ("o/m", "o/m@v1", "o/m@pr/3", f"o/m@{second}", "solo"), ""
    )
    for name in ("o/m", "o/m@main", "o/m@v1", "o/m@pr/3", f"o/m@{first}"):
        assert find_place(shelf, name) == Place(
            name.removesuffix("@main"), snapshot.resolve(), StoreKind.HUB
        )
    assert shelf.find("o/other") is shelf.find("o/m@v2") is None


def test_what_is_no_model_is_left_out_of_a_hub(folder: Path, tmp_path: Path) -> None:
    """Data sets, and repositories without safetensors; the latter are told when asked for."""
    root = tmp_path / "hub"
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    snapshot = write_hub_model(root, "o/pickle", folder, commit=commit_of("1"))
    (root / "datasets--o--d" / "snapshots" / commit_of("1")).mkdir(parents=True)
    (root / "version.txt").write_text("1")
    (root / "models--a--b--c").mkdir()
    shelf = HubShelf(root)
    assert list_names(shelf) == {}
    assert find_place(shelf, "o/pickle").path == snapshot.resolve()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("../../x", "not a commit"),
        ("", "not a commit"),
        ("a" * 300, "over"),
        (commit_of("9"), "begun"),
    ],
)
def test_a_ref_that_names_no_snapshot_is_told(content: str, words: str, tmp_path: Path) -> None:
    """What a ref's file says is a commit that is here, or an error that names the file."""
    ref = tmp_path / "models--o--m" / "refs" / "main"
    ref.parent.mkdir(parents=True)
    ref.write_text(content)
    place = find_place(HubShelf(tmp_path), "o/m")
    assert isinstance(place.error, InvalidModel)
    assert words in place.error.problem
    assert "models--o--m" in place.error.file
    assert list(list_names(HubShelf(tmp_path))) == ["o/m"]


def test_links_out_of_a_hub_are_told(folder: Path, tmp_path: Path) -> None:
    """A repository, a snapshot and a ref that lie elsewhere are not read."""
    root, commit = tmp_path / "hub", commit_of("1")
    outside = write_hub_model(tmp_path / "out", "o/m", folder, commit=commit)
    root.mkdir()
    (root / "models--o--far").symlink_to(outside.parent.parent)
    near = root / "models--o--near"
    (near / "refs").mkdir(parents=True)
    (near / "snapshots").mkdir()
    (near / "refs" / "main").write_text(commit)
    (near / "snapshots" / commit).symlink_to(outside)
    (near / "refs" / "v1").symlink_to(outside.parent.parent / "refs" / "main")
    shelf = HubShelf(root)
    for name in ("o/far", "o/near", "o/near@v1", f"o/near@{commit}"):
        error = find_place(shelf, name).error
        assert isinstance(error, InvalidModel)
        assert "leads out" in error.problem


def test_ollamas_names(folder: Path, tmp_path: Path) -> None:
    """The registry, the library and the tag may be left out; hosts and namespaces are told."""
    store = OllamaStore(tmp_path / "ollama")
    layers = store.layers_of(folder)
    plain = store.manifest("tiny", layers)
    store.manifest("tiny", layers, tag="8b")
    store.manifest("mine", layers, place=("registry.ollama.ai", "me"))
    store.manifest("far", layers, place=("localhost:5000", "team"))
    store.manifest("gguf", [store.layer(GGUF, "", b"GGUF")])
    bad = store.manifest("bad", [])
    bad.write_text("{")
    shelf = OllamaShelf(store.root)

    assert list_names(shelf).keys() == {
        "tiny:latest", "tiny:8b", "me/mine:latest", "localhost:5000/team/far:latest", "bad:latest"
    }  # fmt: skip
    for name in ("tiny", "tiny:latest", "library/tiny", "registry.ollama.ai/library/tiny:latest"):
        assert find_place(shelf, name) == Place("tiny:latest", plain, StoreKind.OLLAMA)
    assert find_place(shelf, "gguf").name == "gguf:latest"
    assert shelf.find("tiny:70b") is None


def test_a_directory_of_models(folder: Path, tmp_path: Path) -> None:
    """Folders with a config.json, also one level down; one that lies elsewhere is told."""
    root = tmp_path / "models"
    write_tiny_model(root / "one")
    write_tiny_model(root / "org" / "two")
    write_tiny_model(root / ".hidden")
    (root / "empty").mkdir()
    (root / "link").symlink_to(folder)
    shelf = ModelsShelf(root)
    names = list_names(shelf)
    assert names.keys() == {"one", "org/two", "link"}
    assert "leads out" in names["link"]
    assert find_place(shelf, "org/two").path == root / "org" / "two"


@pytest.fixture(name="full", scope="module")
def store_of_each_kind(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Shelf]]:
    """A directory that is a store of each kind, and holds a model as each."""
    root = tmp_path_factory.mktemp("full") / "store"
    folder = write_tiny_model(root / "o" / "m")
    write_hub_model(root, "o/m", folder, commit=commit_of("1"), refs=("main", "v1"))
    store = OllamaStore(root)
    store.manifest("m", store.layers_of(folder))
    return root.resolve(), [ModelsShelf(root), HubShelf(root), OllamaShelf(root)]


@settings(max_examples=examples(150), deadline=None, derandomize=SAME_EACH_TIME)
@given(name=st.text("./@:-mo~\\\0\n", max_size=24) | st.text(max_size=30))
def test_no_text_leads_out_of_a_store(name: str, full: tuple[Path, list[Shelf]]) -> None:
    """Whatever is asked for: a place in the store, or none, and no error but our own."""
    root, shelves = full
    for shelf in shelves:
        place = shelf.find(name)
        assert place is None or place.path.resolve().is_relative_to(root)


@pytest.mark.parametrize("kind", StoreKind)
def test_no_name_leads_out_of_a_store(kind: StoreKind, folder: Path, tmp_path: Path) -> None:
    """Names that would be paths to elsewhere are no names; a store that is not there is empty."""
    root = tmp_path / "store"
    shelves: dict[StoreKind, Shelf] = {
        StoreKind.MODELS: ModelsShelf(root),
        StoreKind.HUB: HubShelf(root),
        StoreKind.OLLAMA: OllamaShelf(root),
    }
    shelf = shelves.get(kind)
    if shelf is None:
        return
    assert list_names(shelf) == {}
    write_hub_model(root, "o/m", folder, commit=commit_of("1"), refs=("main", "v1"))
    store = OllamaStore(root)
    store.manifest("m", store.layers_of(folder))
    for name in ODD:
        place = shelf.find(name)
        assert place is None or place.path.resolve().is_relative_to(root), name
