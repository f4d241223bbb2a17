"""Pulling from a hub on loopback: what is taken, what is refused, and that it goes on."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from mlxd_controller.pulling.choosing import RemoteFile, check_names, choose_needed
from mlxd_controller.pulling.hub import UNFINISHED, Pulled, Wanted, pull
from mlxd_controller.pulling.hub_api import Hub, PullFailed, Reason
from mlxd_controller.store.hub import HubShelf
from mlxd_models.files.digest import model_digest
from mlxd_shared.domain.errors import InvalidModel, InvalidRequest
from tests.support.cli import mlxd
from tests.support.hub_server import FakeHub, Repository, serving
from tests.support.made_stores import commit_of
from tests.support.tiny_model import write_tiny_model

COMMIT = commit_of("1")
WEIGHTS = "model.safetensors"
PART_NBYTES = 10 << 20
"""Which the library reads before it writes it."""


def files_of(folder: Path) -> dict[str, bytes]:
    """Return a folder's files."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(name="hub")
def hub_with_a_model(tmp_path: Path) -> Iterator[FakeHub]:
    """A hub that has a tiny model, and beside it what nobody needs."""
    files = files_of(write_tiny_model(tmp_path / "tiny"))
    files |= {"README.md": b"# m", "pytorch_model.bin": b"p", "onnx/model.onnx": b"o"}
    repository = Repository(COMMIT, files, ("main", "v1"))
    with serving(FakeHub({"o/m": repository})) as served:
        yield served


def pull_model(hub: FakeHub, tmp_path: Path, name: str = "o/m", revision: str = "main") -> Pulled:
    """Pull into the cache of this test."""
    wanted = Wanted(name, revision, tmp_path / "hub")
    return pull(Hub(endpoint=hub.endpoint, token="secret"), wanted, lambda *_: None)


def test_a_pull_takes_what_a_model_needs(hub: FakeHub, tmp_path: Path) -> None:
    """The store of the cache finds it, with the digest of the original; nothing more is there,
    and pulled again nothing is fetched again."""
    steps: list[tuple[str, int, int]] = []
    wanted = Wanted("o/m", "main", tmp_path / "hub")
    first = pull(Hub(endpoint=hub.endpoint), wanted, lambda *step: steps.append(step))

    place = HubShelf(tmp_path / "hub").find("o/m")
    assert place is not None
    assert place.path == first.path.resolve()
    assert model_digest(place.path) == model_digest(tmp_path / "tiny")
    assert {path.name for path in first.path.iterdir()} == {
        path.name for path in (tmp_path / "tiny").iterdir()
    }
    assert steps[-1][1:] == (first.nbytes, first.nbytes)
    assert any(0 < here < all_ for _, here, all_ in steps)
    count = len(hub.requested)
    assert pull_model(hub, tmp_path) == first
    assert [method for method, _, _ in hub.requested[count:]] == ["GET"]  # the listing


def test_a_revision_is_pinned(hub: FakeHub, tmp_path: Path) -> None:
    """A name moves when it is pulled, a commit never does; both are found under what was asked."""
    for revision in ("v1", COMMIT):
        assert pull_model(hub, tmp_path, revision=revision).commit == COMMIT
    shelf = HubShelf(tmp_path / "hub")
    assert {place.name for place in shelf.places()} == {"o/m@v1"}
    assert shelf.find(f"o/m@{COMMIT}") is not None
    assert shelf.find("o/m") is None


def test_a_pull_that_was_cut_off_goes_on(hub: FakeHub, tmp_path: Path) -> None:
    """From what was written, whole parts as the library takes them; the name leads nowhere until
    all is there."""
    content = random.Random(1).randbytes(2 * PART_NBYTES + 5)
    hub.repositories["o/m"].files[WEIGHTS] = content
    kept = dict(hub.repositories)
    hub.cut_at[WEIGHTS], hub.broken_for_good = PART_NBYTES + 100, True
    with pytest.raises(PullFailed):
        pull_model(hub, tmp_path)
    (unfinished,) = (tmp_path / "hub").glob(f"**/*{UNFINISHED}")
    assert unfinished.stat().st_size == PART_NBYTES
    assert HubShelf(tmp_path / "hub").find("o/m") is None

    hub.repositories, hub.broken_for_good, before = kept, False, len(hub.ranges_of(WEIGHTS))
    assert (pull_model(hub, tmp_path).path / WEIGHTS).read_bytes() == content
    assert hub.ranges_of(WEIGHTS)[before:] == [f"bytes={PART_NBYTES}-"]
    assert not list((tmp_path / "hub").glob(f"**/*{UNFINISHED}"))


def test_bytes_that_are_not_what_was_promised_are_dropped(hub: FakeHub, tmp_path: Path) -> None:
    """A file counts by its hash, not by its size."""
    hub.damaged.add(WEIGHTS)
    with pytest.raises(PullFailed, match="damaged"):
        pull_model(hub, tmp_path)
    hub.damaged.clear()
    assert pull_model(hub, tmp_path).commit == COMMIT


@pytest.mark.parametrize(
    ("refusal", "words", "reason"),
    [
        ((401, "GatedRepo"), "accept its terms", Reason.OTHER),
        ((403, ""), "denies", Reason.OTHER),
        ((401, "RepoNotFound"), "no model", Reason.NOT_FOUND),
        ((404, "RepoNotFound"), "no model", Reason.NOT_FOUND),
        ((503, ""), "503", Reason.NO_ANSWER),
    ],
)
def test_a_refusal_is_told_in_a_line(
    refusal: tuple[int, str], words: str, reason: Reason, hub: FakeHub, tmp_path: Path
) -> None:
    """Gated, forbidden, not there, broken: what it is and what helps."""
    hub.repositories["o/m"].refusal = refusal
    with pytest.raises(PullFailed, match=words) as caught:
        pull_model(hub, tmp_path)
    assert caught.value.reason is reason
    assert "\n" not in str(caught.value)


def test_what_is_not_there_is_not_found(hub: FakeHub, tmp_path: Path) -> None:
    """A repository, a revision, a hub."""
    for name, revision in (("o/none", "main"), ("o/m", "v9")):
        with pytest.raises(PullFailed) as caught:
            pull_model(hub, tmp_path, name, revision)
        assert caught.value.reason is Reason.NOT_FOUND
    hub.endpoint = "http://127.0.0.1:9"
    with pytest.raises(PullFailed, match="no answer") as caught:
        pull_model(hub, tmp_path)
    assert caught.value.reason is Reason.NO_ANSWER


def test_the_index_names_the_shards_that_are_taken() -> None:
    """Other weights of the repository are left; without an index it is the one file, or all."""
    shards = [RemoteFile(name) for name in ("a.safetensors", "b.safetensors", "c.safetensors")]
    index = {"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}
    assert [file.name for file in choose_needed(shards, index=index)] == [
        "a.safetensors",
        "b.safetensors",
    ]
    assert choose_needed(shards, index=None) == tuple(shards)
    assert choose_needed([*shards, RemoteFile(WEIGHTS)], index=None) == (RemoteFile(WEIGHTS),)
    with pytest.raises(InvalidModel, match=r"d\.safetensors") as caught:
        choose_needed(shards, index={"weight_map": {"x": "d.safetensors"}})
    assert caught.value.field == "x"


@pytest.mark.parametrize("shard", ["model.bin", "sub/a.safetensors", "README.md", 7, ["a"], None])
def test_an_index_asks_for_nothing_but_safetensors(shard: object) -> None:
    """What the repository's own index calls a shard is one, or refused by the tensor's name."""
    files = [RemoteFile(name) for name in ("model.bin", "sub/a.safetensors", "README.md")]
    with pytest.raises(InvalidModel, match="not a safetensors file") as caught:
        choose_needed(files, index={"weight_map": {"x": shard}})
    assert caught.value.field == "x"


@pytest.mark.parametrize("name", ["m.PKL", "sub/m.Bin", "x.joblib", "x.npy", "tokenizer.PT"])
def test_no_pattern_takes_a_pickle(name: str) -> None:
    """Whatever its name is spelled like; texts that look like one are left."""
    files = [RemoteFile(WEIGHTS), RemoteFile(name)]
    assert choose_needed(files, index=None) == (RemoteFile(WEIGHTS),)
    with pytest.raises(InvalidRequest, match="run code"):
        choose_needed(files, index=None, include=["*"])


@pytest.mark.parametrize(
    ("name", "words"), [("m.bin", "pickle"), ("m.gguf", "GGUF"), ("m.md", "no weights")]
)
def test_other_formats_are_refused(name: str, words: str) -> None:
    """A repository of pickles alone is refused as such, and so is one of GGUF."""
    with pytest.raises(InvalidModel, match=words):
        choose_needed([RemoteFile("config.json"), RemoteFile(name)], index=None)


def test_patterns_add_files_but_never_pickles() -> None:
    """What is asked for besides is taken; what runs code when it is read is not."""
    files = [RemoteFile(name) for name in (WEIGHTS, "README.md", "x/y.md", "training_args.bin")]
    chosen = choose_needed(files, index=None, include=("*.md",))
    assert [file.name for file in chosen] == ["README.md", WEIGHTS, "x/y.md"]
    with pytest.raises(InvalidRequest, match=r"training_args\.bin"):
        choose_needed(files, index=None, include=("*",))


@pytest.mark.parametrize("name", ["../x", "a/../../x", "/etc/passwd", "a\\..\\b", "a\nb", ""])
def test_a_name_that_leads_out_refuses_the_repository(
    name: str, hub: FakeHub, tmp_path: Path
) -> None:
    """Before anything of it is fetched."""
    with pytest.raises(InvalidModel, match="leads out"):
        check_names([RemoteFile(name)])
    hub.repositories["o/m"].files[name] = b"x"
    with pytest.raises(InvalidModel, match="leads out"):
        pull_model(hub, tmp_path)
    assert not (tmp_path / "hub").exists()


@pytest.mark.asyncio
async def test_the_command(hub: FakeHub, tmp_path: Path) -> None:
    """HF_ENDPOINT and HF_HUB_CACHE are honoured, no server is needed, and exit codes say why."""
    run = partial(
        mlxd,
        "pull",
        HF_ENDPOINT=hub.endpoint,
        MLXD_HUB_CACHE=str(tmp_path / "hub"),
        HF_HUB_OFFLINE="0",
    )
    done = await run("o/m", "--json")
    assert (done.code, done.err) == (0, done.err)
    (summary,) = done.objects
    assert (summary["commit"], Path(summary["path"]).name) == (COMMIT, COMMIT)
    missing = await run("o/none")
    assert missing.code == 3
    assert "no model o/none" in missing.err
    for bad in ("../x", "o/m@..", "o/m@", "o/m@-x"):
        assert (await run("--", bad)).code == 2
