"""Pulling from a hub on loopback: what is taken, what is refused, and that it goes on."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlxd_controller.pulling.choosing import (
    FILE_NAME_CHARS_MAX,
    RemoteFile,
    check_names,
    choose_needed,
)
from mlxd_controller.pulling.hub import UNFINISHED, pull
from mlxd_controller.pulling.hub_api import Hub
from mlxd_controller.pulling.wanted import Wanted
from mlxd_controller.store.hub import HubShelf
from mlxd_models.files.digest import model_digest
from mlxd_shared.domain.errors import (
    HubDenied,
    HubUnavailable,
    InvalidModel,
    InvalidRequest,
    MlxdError,
    ModelNotFound,
    PullFailed,
    PullInterrupted,
)
from mlxd_shared.domain.pulls import PulledModel, PullPhase, PullProgress
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


def pull_model(
    hub: FakeHub, tmp_path: Path, name: str = "o/m", revision: str = "main"
) -> PulledModel:
    """Pull into the cache of this test."""
    wanted = Wanted(name, revision, tmp_path / "hub")
    return pull(Hub(endpoint=hub.endpoint, token="secret"), wanted, lambda *_: None)


def test_a_pull_takes_what_a_model_needs(hub: FakeHub, tmp_path: Path) -> None:
    """The store of the cache finds it, with the digest of the original; nothing more is there,
    and pulled again nothing is fetched again."""
    steps: list[PullProgress] = []
    wanted = Wanted("o/m", "main", tmp_path / "hub")
    first = pull(Hub(endpoint=hub.endpoint), wanted, steps.append)

    place = HubShelf(tmp_path / "hub").find("o/m")
    assert place is not None
    assert place.path == Path(first.path).resolve()
    assert first.digest == model_digest(place.path) == model_digest(tmp_path / "tiny")
    assert {path.name for path in Path(first.path).iterdir()} == {
        path.name for path in (tmp_path / "tiny").iterdir()
    }
    count = len(hub.requested)
    assert pull_model(hub, tmp_path) == first
    assert [method for method, _, _ in hub.requested[count:]] == ["GET"]  # the listing


def test_each_step_says_which_file_and_how_much(hub: FakeHub, tmp_path: Path) -> None:
    """Files one after another, the weights last, each by its hash and to its end, then checked;
    the figures of all only grow."""
    steps: list[PullProgress] = []
    wanted = Wanted("o/m", "main", tmp_path / "hub")
    pulled = pull(Hub(endpoint=hub.endpoint), wanted, steps.append)
    files = hub.repositories["o/m"].files

    assert steps[0] == PullProgress(PullPhase.LISTING)
    names = list(dict.fromkeys(step.file for step in steps[1:]))
    assert names[-1] == WEIGHTS
    assert len(names) == pulled.files
    for name in names:
        of_file = [step for step in steps if step.file == name]
        content = hashlib.sha256(files[name]).hexdigest()
        assert {step.file_digest for step in of_file} == {f"sha256:{content}"}
        assert of_file[-1].file_done_nbytes == of_file[-1].file_size_nbytes == len(files[name])
        assert PullPhase.VERIFYING in {step.phase for step in of_file}
    done = [step.done_nbytes for step in steps]
    assert done == sorted(done)
    assert (steps[-1].done_nbytes, steps[-1].total_nbytes) == (pulled.nbytes, pulled.nbytes)


def test_nothing_is_counted_before_the_files_are_known(tmp_path: Path) -> None:
    """An index is fetched first, as it names the weights; the figures of all begin behind it."""
    index = json.dumps({"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}).encode()
    shards = {"a.safetensors": b"a" * 100, "b.safetensors": b"b" * 50, "c.safetensors": b"c"}
    files = {"config.json": b"{}", "model.safetensors.index.json": index, **shards}
    steps: list[PullProgress] = []
    with serving(FakeHub({"o/m": Repository(COMMIT, files)})) as hub:
        pulled = pull(
            Hub(endpoint=hub.endpoint), Wanted("o/m", "main", tmp_path / "hub"), steps.append
        )
    assert {step.file for step in steps} == {"", *files} - {"c.safetensors"}
    done = [step.done_nbytes for step in steps]
    assert done == sorted(done)
    assert {step.done_nbytes for step in steps if not step.total_nbytes} == {0}
    assert pulled.nbytes == done[-1] == 2 + len(index) + 150
    assert pulled.digest == "", "no header is in these files"


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
    with pytest.raises(MlxdError):
        pull_model(hub, tmp_path)
    (unfinished,) = (tmp_path / "hub").glob(f"**/*{UNFINISHED}")
    assert unfinished.stat().st_size == PART_NBYTES
    assert HubShelf(tmp_path / "hub").find("o/m") is None

    hub.repositories, hub.broken_for_good, before = kept, False, len(hub.ranges_of(WEIGHTS))
    assert Path(pull_model(hub, tmp_path).path, WEIGHTS).read_bytes() == content
    assert hub.ranges_of(WEIGHTS)[before:] == [f"bytes={PART_NBYTES}-"]
    assert not list((tmp_path / "hub").glob(f"**/*{UNFINISHED}"))


def test_bytes_that_are_not_what_was_promised_are_dropped(hub: FakeHub, tmp_path: Path) -> None:
    """A file counts by its hash, not by its size."""
    hub.damaged.add(WEIGHTS)
    with pytest.raises(PullInterrupted, match="damaged"):
        pull_model(hub, tmp_path)
    hub.damaged.clear()
    assert pull_model(hub, tmp_path).commit == COMMIT


@pytest.mark.parametrize(
    ("refusal", "words", "kind"),
    [
        ((401, "GatedRepo"), "accept its terms", HubDenied),
        ((403, ""), "denies", HubDenied),
        ((401, "RepoNotFound"), "no model", ModelNotFound),
        ((404, "RepoNotFound"), "no model", ModelNotFound),
        ((404, ""), "no o/m", PullFailed),
        ((503, ""), "503", HubUnavailable),
    ],
)
def test_a_refusal_is_told_in_a_line(
    refusal: tuple[int, str], words: str, kind: type[MlxdError], hub: FakeHub, tmp_path: Path
) -> None:
    """Gated, forbidden, not there, broken: what it is and what helps."""
    hub.repositories["o/m"].refusal = refusal
    with pytest.raises(kind, match=words) as caught:
        pull_model(hub, tmp_path)
    assert type(caught.value) is kind
    assert "\n" not in str(caught.value)


def test_what_is_not_there_is_not_found(hub: FakeHub, tmp_path: Path) -> None:
    """A repository, a revision, a hub."""
    for name, revision in (("o/none", "main"), ("o/m", "v9")):
        with pytest.raises(ModelNotFound, match=name):
            pull_model(hub, tmp_path, name, revision)
    hub.endpoint = "http://127.0.0.1:9"
    with pytest.raises(HubUnavailable, match="no answer"):
        pull_model(hub, tmp_path)


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


def test_a_name_too_long_refuses_the_repository() -> None:
    """It would be in every step that is reported; the longest that may be is taken."""
    check_names([RemoteFile("a" * FILE_NAME_CHARS_MAX)])
    with pytest.raises(InvalidModel, match=str(FILE_NAME_CHARS_MAX)):
        check_names([RemoteFile("a" * (FILE_NAME_CHARS_MAX + 1))])
