"""Pulls that meet damage, full disks, odd hubs: what is kept, what is told, what is sent where."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlxd_controller.pulling.choosing import RemoteFile
from mlxd_controller.pulling.hub import pull
from mlxd_controller.pulling.hub_api import Hub, RemotePart
from mlxd_controller.pulling.wanted import Wanted
from mlxd_controller.store.hub import HubShelf
from mlxd_shared import config
from mlxd_shared.domain.errors import HubDenied, MlxdError, PullFailed, StoreFull
from mlxd_shared.domain.pulls import PulledModel
from tests.support.hub_server import FakeHub, Repository, serving
from tests.support.made_stores import commit_of
from tests.support.tiny_model import write_tiny_model

COMMIT = commit_of("1")
WEIGHTS = "model.safetensors"


@pytest.fixture(name="hub")
def hub_with_a_model(tmp_path: Path) -> Iterator[FakeHub]:
    """A hub that has a tiny model."""
    folder = write_tiny_model(tmp_path / "tiny")
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    with serving(FakeHub({"o/m": Repository(COMMIT, files, ("main", "v1", "v1/x"))})) as served:
        yield served


def pull_model(hub: FakeHub, cache: Path, revision: str = "main") -> PulledModel:
    """Pull into a cache."""
    hub_client = Hub(endpoint=hub.endpoint, token="secret")
    return pull(hub_client, Wanted("o/m", revision, cache), lambda *_: None)


def test_what_is_not_all_here_is_listed_as_no_model(hub: FakeHub, tmp_path: Path) -> None:
    """Weights come last: a pull that is cut off before them leaves what no store takes for one."""
    hub.cut_at["tokenizer.json"], hub.broken_for_good = 10, True
    with pytest.raises(MlxdError):
        pull_model(hub, tmp_path / "hub")
    assert list(HubShelf(tmp_path / "hub").places()) == []


def test_a_file_that_lost_its_end_is_fetched_again(hub: FakeHub, tmp_path: Path) -> None:
    """A pull leaves behind what has the length that the hub tells, and nothing else is fetched."""
    snapshot = Path(pull_model(hub, tmp_path / "hub").path)
    whole = (snapshot / WEIGHTS).read_bytes()
    os.truncate((snapshot / WEIGHTS).resolve(), len(whole) // 2)
    count = len(hub.requested)

    assert Path(pull_model(hub, tmp_path / "hub").path, WEIGHTS).read_bytes() == whole
    assert {path for _, path, _ in hub.requested[count:] if WEIGHTS not in path} == {
        "/api/models/o/m/revision/main"
    }


def test_a_file_is_asked_about_once(hub: FakeHub, tmp_path: Path) -> None:
    """What it is called decides where it goes; a hub that says something else later is not heard,
    and a name that is a path refuses the pull."""
    done = pull_model(hub, tmp_path / "hub")
    heads = [path for method, path, _ in hub.requested if method == "HEAD"]
    assert len(heads) == len(set(heads)) == done.files

    hub.etags["config.json"] = "../../../config.json"
    with pytest.raises(PullFailed, match="not a hash"):
        pull_model(hub, tmp_path / "other")
    assert not list(tmp_path.glob("*.json"))


def test_what_the_disk_refuses_is_told_in_a_line(hub: FakeHub, tmp_path: Path) -> None:
    """A file where a directory should be, for the cache or for a revision's name."""
    (tmp_path / "file").write_text("")
    with pytest.raises(PullFailed, match="file"):
        pull_model(hub, tmp_path / "file")
    pull_model(hub, tmp_path / "hub", "v1")
    with pytest.raises(PullFailed, match="v1"):
        pull_model(hub, tmp_path / "hub", "v1/x")


class ListedHub(Hub):
    """A hub with one file, of which nothing has to be fetched."""

    def __init__(self, nbytes: int, content: str) -> None:
        super().__init__(endpoint="http://127.0.0.1:9")
        self._file = RemoteFile(WEIGHTS, nbytes, content)

    def listing(self, repository: str, revision: str) -> tuple[str, list[RemoteFile]]:
        """Tell of the file."""
        return COMMIT, [self._file]

    def part(self, repository: str, name: str, commit: str) -> RemotePart:
        """Tell where it would be."""
        return RemotePart(name, "", self._file.content, self._file.nbytes, plain=True)


def test_what_is_here_already_needs_no_room(tmp_path: Path) -> None:
    """A revision whose weights another one has brought is pulled onto a disk that is all but full;
    one whose weights are not here is refused before anything is fetched."""
    nbytes, content = 2 * shutil.disk_usage(tmp_path).total, hashlib.sha256().hexdigest()
    wanted, hub = Wanted("o/m", "main", tmp_path / "hub"), ListedHub(nbytes, content)
    with pytest.raises(StoreFull, match="are needed"):
        pull(hub, wanted, lambda *_: None)
    blob = tmp_path / "hub" / "models--o--m" / "blobs" / content
    blob.parent.mkdir(parents=True)
    blob.touch()
    os.truncate(blob, nbytes)  # of holes

    pulled = pull(hub, wanted, lambda *_: None)
    assert Path(pulled.path, WEIGHTS).resolve() == blob.resolve()
    assert pulled.digest == "", "holes are no weights"
    blob.unlink()


def test_a_pull_leaves_the_disk_its_reserve(tmp_path: Path) -> None:
    """What would fit, but not beside the reserve, is refused with all three figures."""
    free = shutil.disk_usage(tmp_path).free
    nbytes = max(free - config.PULL_RESERVE_BYTES // 2, 1)
    hub = ListedHub(nbytes, hashlib.sha256().hexdigest())
    with pytest.raises(StoreFull, match=r"free, .* are needed, and .* stay in reserve"):
        pull(hub, Wanted("o/m", "main", tmp_path / "hub"), lambda *_: None)


def test_a_pull_stops_where_others_fill_the_disk(hub: FakeHub, tmp_path: Path) -> None:
    """Each had room when it began; what has arrived stays, and the next one goes on."""
    wanted, client = Wanted("o/m", "main", tmp_path / "hub"), Hub(endpoint=hub.endpoint)
    free = iter([2 * config.PULL_RESERVE_BYTES])
    with pytest.raises(StoreFull, match=r"free, and 1\.0 GiB stay in reserve; what has arrived"):
        pull(client, wanted, lambda *_: None, free_of=lambda _: next(free, 1))
    assert list(HubShelf(tmp_path / "hub").places()) == []

    assert Path(pull(client, wanted, lambda *_: None).path, WEIGHTS).exists()


def test_no_error_tells_where_bytes_are(hub: FakeHub, tmp_path: Path) -> None:
    """Such an address may let in whoever knows it; the file's name is told."""
    hub.refused.add(WEIGHTS)
    with pytest.raises(HubDenied, match=WEIGHTS) as caught:
        pull_model(hub, tmp_path / "hub")
    assert "://" not in str(caught.value)


@pytest.mark.parametrize("methods", [("HEAD", "GET"), ("GET",)])
def test_the_token_is_for_the_hub_alone(
    methods: tuple[str, ...], hub: FakeHub, tmp_path: Path
) -> None:
    """Who is sent elsewhere for the bytes, at once or late, goes there without it."""
    elsewhere = FakeHub(hub.repositories)
    with serving(elsewhere):
        hub.moved = dict.fromkeys(methods, elsewhere.endpoint)
        assert pull_model(hub, tmp_path / "hub").commit == COMMIT
    assert set(hub.tokens) == {"Bearer secret"}
    assert elsewhere.ranges_of(WEIGHTS)
    assert set(elsewhere.tokens) == {""}
