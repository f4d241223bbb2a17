"""The run directory: the same after a restart, private, and one controller's at a time."""

from __future__ import annotations

import asyncio
import os
import stat
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlxd_controller.launcher.run_dir import (
    LOCK_NAME,
    SHORT_TEMPORARY_DIR,
    RunDir,
    default_parent,
    name_of,
    open_run_dir,
)
from mlxd_shared.domain.errors import InvalidRequest


@pytest.fixture(name="runtime")
def runtime_folder() -> Iterator[Path]:
    """A folder of the user's own, with a path that leaves room."""
    with tempfile.TemporaryDirectory(prefix="mlxd-test-") as folder:
        yield Path(folder)


def mode_of(path: Path) -> int:
    """Return the permissions."""
    return stat.S_IMODE(path.stat().st_mode)


def test_the_name_is_the_addresses() -> None:
    """One address, one name; another address, another; none where the system chooses the port."""
    assert name_of("127.0.0.1:8555") == name_of("tcp:127.0.0.1:8555") == "127.0.0.1-8555"
    others = ("0.0.0.0:8555", "127.0.0.1:8556", "[::1]:8555", "unix:/a/b", "unix:/a/c")
    assert len({name_of(address) for address in others}) == len(others)
    assert name_of(f"{'h' * 200}:1") != name_of(f"{'h' * 201}:1")
    assert all(len(name_of(a) or "") <= 40 for a in (*others, f"{'h' * 200}:1"))
    assert name_of("127.0.0.1:0") is None


def test_a_default_folder_lies_in_the_users_runtime_folder(runtime: Path) -> None:
    """Where that is there and the user's own; else in /tmp, under the user's id."""
    assert default_parent({"XDG_RUNTIME_DIR": str(runtime)}) == runtime / "mlxd"
    own = SHORT_TEMPORARY_DIR / f"mlxd-{os.geteuid()}"
    bad = ("", "relative", str(runtime / "missing"), str(runtime / ("x" * 100)), "/usr")
    parents = {default_parent({"XDG_RUNTIME_DIR": text}) for text in bad[:4]}
    assert parents == {own}
    assert default_parent({}) == own


def test_a_default_folder_is_found_again_and_goes_at_the_end(runtime: Path) -> None:
    """The same path for the same address, private at every level; close() leaves nothing of it."""
    environment = {"XDG_RUNTIME_DIR": str(runtime)}
    paths = []
    for _ in range(2):
        run_dir = open_run_dir(None, address="127.0.0.1:8555", environment=environment)
        paths.append(run_dir.path)
        assert (mode_of(run_dir.path), mode_of(run_dir.path.parent)) == (0o700, 0o700)
        (run_dir.path / "0123abcd-1.json").touch()
        run_dir.close()
        assert not list(runtime.iterdir())
    assert paths[0] == paths[1] == runtime / "mlxd" / "127.0.0.1-8555"


def test_a_folder_that_cannot_be_private_is_not_used(runtime: Path) -> None:
    """Where the default name is taken, sockets lie in a folder that nobody can foresee."""
    (runtime / "mlxd").touch()
    run_dir = open_run_dir(
        None, address="127.0.0.1:8555", environment={"XDG_RUNTIME_DIR": str(runtime)}
    )
    assert runtime not in run_dir.path.parents
    assert mode_of(run_dir.path) == 0o700
    run_dir.close()
    assert not run_dir.path.exists()


def test_a_given_folder_is_made_private_and_keeps_what_is_not_ours(tmp_path: Path) -> None:
    """Its mode is corrected; at the end our files go, the folder and others' files stay."""
    folder = tmp_path / "run"
    folder.mkdir(mode=0o755)
    for name in ("0123abcd-1.sock", "0123abcd-1.json", "fedc0000-a.out", "mine.json", "x-1.sock"):
        (folder / name).touch()
    run_dir = RunDir.claim(folder)
    assert mode_of(folder) == 0o700
    assert run_dir.stems() == ("0123abcd-1", "fedc0000-a")
    run_dir.close()
    assert sorted(path.name for path in folder.iterdir()) == ["mine.json", "x-1.sock"]


def test_a_folder_for_all_users_is_left_as_it_is(tmp_path: Path) -> None:
    """One like /tmp is not made private, whoever owns it: others would be locked out."""
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(0o1777)
    with pytest.raises(InvalidRequest, match="by all users"):
        RunDir.claim(folder)
    assert mode_of(folder) == 0o1777
    assert not list(folder.iterdir())


def test_a_second_controller_is_refused(tmp_path: Path) -> None:
    """While one holds the folder, the next is told who does; afterwards it may have it."""
    first = RunDir.claim(tmp_path / "run")
    with pytest.raises(InvalidRequest, match=rf"process {os.getpid()}.*--run-dir"):
        RunDir.claim(tmp_path / "run")
    # In a folder that is named by the address a folder of its own would lead to a taken port.
    advice = rf"^address: .*process {os.getpid()}\) serves 127.0.0.1:1; .* another --address$"
    with pytest.raises(InvalidRequest, match=advice):
        RunDir.claim(tmp_path / "run", served="127.0.0.1:1")
    first.close()
    second = RunDir.claim(tmp_path / "run")
    assert (second.path / LOCK_NAME).read_text() == f"{os.getpid()}\n"
    second.close()


def test_links_are_not_followed(tmp_path: Path) -> None:
    """Neither a folder nor a lock that is a link is used: it may lead to what is another's."""
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "there")
    with pytest.raises(InvalidRequest, match="link"):
        RunDir.claim(tmp_path / "link")
    (tmp_path / "there" / LOCK_NAME).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(InvalidRequest, match="lock"):
        RunDir.claim(tmp_path / "there")
    assert not (tmp_path / "elsewhere").exists()


def test_a_run_dir_too_long_for_a_socket_is_refused(tmp_path: Path) -> None:
    """The limit of a socket's path is named at the start, not met at the first load."""
    with pytest.raises(InvalidRequest, match="longer than"):
        RunDir.claim(tmp_path / ("x" * 100))


@pytest.mark.asyncio
async def test_a_long_temporary_folder_is_no_hindrance(tmp_path: Path) -> None:
    """A temporary run_dir lies where temporary files do, or in /tmp where that is too long."""
    long = tmp_path / ("x" * 100)
    long.mkdir()
    script = (
        "from mlxd_controller.launcher.run_dir import RUN_DIR_BYTES_MAX, RunDir\n"
        "run_dir = RunDir.temporary()\n"
        "assert len(str(run_dir.path)) <= RUN_DIR_BYTES_MAX\n"
        "assert run_dir.path.stat().st_mode & 0o777 == 0o700\n"
        "run_dir.close()\n"
        "assert not run_dir.path.exists()\n"
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", script, env={**os.environ, "TMPDIR": str(long)}
    )
    assert await process.wait() == 0
    assert not list(long.iterdir())
