"""The file of keys: read again when it changes, never written by halves."""

from __future__ import annotations

import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from mlxd_shared.domain.errors import BadCredentials
from mlxd_shared.security.key_file import KeyFile, editing, read_keys
from mlxd_shared.security.keys import Key, hash_of


@pytest.fixture(name="path")
def key_path(tmp_path: Path) -> Path:
    """A file with one key."""
    path = tmp_path / "own" / "keys.json"
    add(path, "first")
    return path


def add(path: Path, name: str) -> None:
    """Add a key whose secret is its name."""
    with editing(path) as keys:
        keys.append(Key(name, hash_of(name)))


def names(path: Path) -> list[str]:
    """Return the names that the file has."""
    return [key.name for key in read_keys(path).keys]


def test_a_change_is_seen(path: Path) -> None:
    """A key that is added is known, one that is removed is not any more."""
    file = KeyFile(path, look_s=0.0)
    add(path, "second")
    assert file.ring.find("second") is not None
    with editing(path) as keys:
        del keys[0]
    assert file.ring.find("first") is None


def test_between_two_looks_nothing_is_read(path: Path) -> None:
    """Each call would cost a look at the disk otherwise."""
    file = KeyFile(path, look_s=3600.0)
    add(path, "second")
    assert file.ring.find("second") is None


@pytest.mark.parametrize("content", [b"{", b'{"keys": 1}', None])
def test_a_file_that_breaks_changes_nothing(path: Path, content: bytes | None) -> None:
    """The keys that it had hold, the log says so once, and a good file is read again."""
    file = KeyFile(path, look_s=0.0)
    good = path.read_bytes()
    path.unlink() if content is None else path.write_bytes(content)
    with capture_logs() as logs:
        assert [file.ring.find("first") is not None for _ in range(3)] == [True] * 3
    assert [entry["event"] for entry in logs] == ["keys stay as they were"]
    path.write_bytes(good)
    add(path, "second")
    assert file.ring.find("second") is not None


def test_a_server_does_not_start_on_a_broken_file(path: Path) -> None:
    """What an operator names is used or refused."""
    path.write_bytes(b"{")
    with pytest.raises(BadCredentials, match="is not JSON"):
        KeyFile(path)
    with pytest.raises(BadCredentials, match="is not JSON"), editing(path):
        pytest.fail("nothing is edited")
    assert path.read_bytes() == b"{"


def test_writers_at_once_lose_nothing(path: Path) -> None:
    """Each reads what the one before has written; the file stays its owner's."""
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: add(path, f"k{number}"), range(40)))
    assert sorted(names(path)) == sorted(["first", *(f"k{number}" for number in range(40))])
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert {each.name for each in path.parent.iterdir()} == {".keys.json.lock", "keys.json"}


def test_an_error_in_between_writes_nothing(path: Path) -> None:
    """The body's own error comes out as it is."""
    with pytest.raises(IndexError), editing(path) as keys:
        keys.pop(7)
    assert names(path) == ["first"]


def test_a_disk_that_fails_is_told(tmp_path: Path) -> None:
    """A folder in the file's place: an error that names it, and no traceback."""
    (tmp_path / "keys.json" / "in").mkdir(parents=True)
    with pytest.raises(BadCredentials, match=r"keys\.json"):
        add(tmp_path / "keys.json", "first")
