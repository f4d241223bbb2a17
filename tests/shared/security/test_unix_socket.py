"""Where Unix sockets may lie and what they may take the place of, with real servers on them."""

from __future__ import annotations

import errno
import os
import socket
import stat
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from mlxd_shared.domain.errors import InvalidRequest
from mlxd_shared.security.listeners import ListenerFiles
from mlxd_shared.security.net import parse_address
from mlxd_shared.security.secure_channel import PLAIN, ChannelSecurity, channel
from mlxd_shared.serving.server import Health, listen, make_server
from tests.support.certificates import token_file
from tests.support.echo import Echo, ask, outcome

UNAUTHENTICATED = grpc.StatusCode.UNAUTHENTICATED


@pytest.fixture
def folder() -> Iterator[Path]:
    """A private folder with a path short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="mlxd-") as path:
        yield Path(path)


def bind(path: Path, *, anywhere: bool = False) -> grpc.aio.Server:
    """Return a server that is bound to a socket, not started."""
    server = make_server(Health(), ())
    listen(server, parse_address(f"unix:{path}"), anywhere=anywhere)
    return server


@pytest.mark.asyncio
async def test_a_socket_is_the_users_alone(folder: Path) -> None:
    """Its folder is made 0700 and the socket 0600."""
    path = folder / "made" / "s"
    server = bind(path)
    await server.start()

    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    await server.stop(None)


@pytest.mark.asyncio
async def test_an_open_folder_is_refused(folder: Path) -> None:
    """A folder that others may enter needs an explicit yes; its mode is not changed."""
    os.chmod(folder, 0o755)  # noqa: PTH101 - this event loop is the test's own
    with pytest.raises(InvalidRequest, match=r"is open to other users \(0755\)"):
        bind(folder / "s")
    assert not (folder / "s").exists()

    server = bind(folder / "s", anywhere=True)
    await server.start()
    assert stat.S_IMODE(os.stat(folder).st_mode) == 0o755  # noqa: PTH116
    await server.stop(None)


@pytest.mark.asyncio
async def test_a_folder_that_cannot_be_made_is_refused(folder: Path) -> None:
    """A file in the way is the operator's problem, told by name."""
    (folder / "file").touch()
    with pytest.raises(InvalidRequest, match="cannot hold a socket"):
        bind(folder / "file" / "s")


@pytest.mark.asyncio
async def test_a_live_socket_is_left_alone(folder: Path) -> None:
    """A second server does not take the place of one that listens."""
    path = folder / "s"
    first = bind(path)
    await first.start()
    with pytest.raises(InvalidRequest, match="another server listens on it"):
        bind(path)
    async with channel(f"unix:{path}") as client:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await ask(client)
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED  # it is still there
    await first.stop(None)


@pytest.mark.asyncio
async def test_only_a_dead_socket_is_removed(folder: Path) -> None:
    """What a killed server left makes room; a file, a link or a folder never does."""
    path = folder / "s"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    server = bind(path)
    await server.start()
    await server.stop(None)

    (folder / "file").write_text("precious", encoding="utf-8")
    (folder / "link").symlink_to(folder / "file")
    (folder / "folder").mkdir()
    for name in ("file", "link", "folder"):
        with pytest.raises(InvalidRequest, match="exists and is not a socket"):
            bind(folder / name)
    assert (folder / "link").is_symlink()
    assert (folder / "file").read_text(encoding="utf-8") == "precious"


@pytest.mark.asyncio
@pytest.mark.skipif(sys.platform == "darwin", reason="macOS answers for a full backlog as for none")
async def test_a_socket_with_a_full_backlog_is_alive(folder: Path) -> None:
    """A server too busy to accept is not taken for a dead one."""
    path = folder / "s"
    with socket.socket(socket.AF_UNIX) as busy:
        busy.bind(str(path))
        busy.listen(0)
        waiting = []
        while True:
            one = socket.socket(socket.AF_UNIX)
            waiting.append(one)
            one.setblocking(False)
            if one.connect_ex(str(path)) in {errno.EAGAIN, errno.ECONNREFUSED}:
                break
        with pytest.raises(InvalidRequest, match="another server listens on it"):
            bind(path)
        for one in waiting:
            one.close()


@pytest.mark.asyncio
async def test_a_folder_of_another_user_is_refused(folder: Path) -> None:
    """Its owner could put another socket in the server's place."""
    if os.geteuid() == 0:
        os.chown(folder, 12345, -1)
    else:
        folder = Path("/")
    with pytest.raises(InvalidRequest, match="belongs to another user"):
        bind(folder / "s")


@pytest.mark.asyncio
async def test_a_token_guards_a_unix_socket_too(folder: Path) -> None:
    """The token works over every transport."""
    security = ListenerFiles(token_file=token_file(folder)).load()
    server = make_server(Health(), (), security=security)
    echo = Echo()
    server.add_generic_rpc_handlers((echo,))
    target = listen(server, parse_address(f"unix:{folder}/s"), security=security)
    await server.start()

    assert await outcome(target, PLAIN) is UNAUTHENTICATED
    assert await outcome(target, ChannelSecurity(token_file=folder / "token")) == b"answer"
    await server.stop(None)
