"""`mlxd health` and `mlxd protos`: what containers, scripts and other languages begin with."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from mlxd_shared.security.net import parse_address
from mlxd_shared.serving.server import Health, listen, make_server
from tests.support.cli import mlxd

PROTO = Path(__file__).resolve().parents[3] / "proto"
MODEL = "models/demo"
PROTOC_TIMEOUT_S = 60


@asynccontextmanager
async def health_server() -> AsyncIterator[tuple[Health, str]]:
    """A server of nothing but health, and its address."""
    health = Health()
    server = make_server(health, ())
    address = listen(server, parse_address("127.0.0.1:0"))
    await server.start()
    try:
        yield health, address
    finally:
        await server.stop(None)


@pytest.mark.asyncio
async def test_a_server_that_serves_is_healthy() -> None:
    """SERVING is exit code 0; a script gets it as JSON."""
    async with health_server() as (health, address):
        await health.set("", serving=True)
        ran = await mlxd("health", "--address", address)
        as_json = await mlxd("health", "--json", "--address", address)

    assert (ran.code, ran.out) == (0, "SERVING\n")
    assert as_json.objects == [{"service": "", "status": "SERVING"}]


@pytest.mark.asyncio
async def test_a_server_that_stops_is_not() -> None:
    """NOT_SERVING is exit code 1, though the server answers."""
    async with health_server() as (health, address):
        await health.leave()
        ran = await mlxd("health", "--address", address)

    assert (ran.code, ran.out) == (1, "NOT_SERVING\n")


@pytest.mark.asyncio
async def test_health_is_told_by_name() -> None:
    """A model has a health of its own, and a name that nobody knows is exit code 3."""
    async with health_server() as (health, address):
        await health.set(MODEL, serving=False)
        known = await mlxd("health", MODEL, "--address", address)
        unknown = await mlxd("health", "models/other", "--address", address)

    assert (known.code, known.out) == (1, "NOT_SERVING\n")
    assert (unknown.code, unknown.out) == (3, "")
    assert "models/other" in unknown.err


@pytest.mark.asyncio
async def test_no_server_is_unhealthy() -> None:
    """Where nobody listens the exit code is 4, at once."""
    with socket.socket() as taken:  # bound, but not listening
        taken.bind(("127.0.0.1", 0))
        ran = await mlxd("health", "--address", f"127.0.0.1:{taken.getsockname()[1]}")

    assert ran.code == 4
    assert "no server answers" in ran.err


@pytest.mark.asyncio
async def test_a_silent_server_is_unhealthy() -> None:
    """--timeout bounds the wait for a server that takes the connection and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        ran = await mlxd("health", "--timeout", "200ms", "--address", address)

    assert ran.code in {1, 4}
    assert ran.out == ""


@pytest.mark.asyncio
async def test_protos_are_the_tree_s_own(tmp_path: Path) -> None:
    """Every file is written, byte for byte, into a folder that was not there, and named."""
    out = tmp_path / "a" / "b"
    ran = await mlxd("protos", "--out", str(out))

    wanted = {path.relative_to(PROTO): path.read_bytes() for path in PROTO.rglob("*.proto")}
    files = {path.relative_to(out): path.read_bytes() for path in out.rglob("*") if path.is_file()}
    assert ran.code == 0
    assert files == wanted
    assert ran.out.splitlines() == sorted(str(out / name) for name in wanted)


@pytest.mark.asyncio
async def test_protos_may_be_written_again(tmp_path: Path) -> None:
    """After an upgrade the same command replaces the files, and only them."""
    old, own = tmp_path / "mlxd" / "v1" / "types.proto", tmp_path / "mlxd" / "own.proto"
    old.parent.mkdir(parents=True)
    old.write_text("old", encoding="utf-8")
    own.write_text("own", encoding="utf-8")
    ran = await mlxd("protos", "--out", str(tmp_path))

    assert ran.code == 0
    assert old.read_bytes() == (PROTO / "mlxd" / "v1" / "types.proto").read_bytes()
    assert own.read_text(encoding="utf-8") == "own"


@pytest.mark.asyncio
async def test_protos_are_a_whole_include_path(tmp_path: Path) -> None:
    """A protoc that knows this folder alone (and Google's own types) accepts the files."""
    await mlxd("protos", "--out", str(tmp_path))
    descriptors = tmp_path / "made.binpb"
    protoc = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "grpc_tools.protoc", f"--proto_path={tmp_path}",
        f"--descriptor_set_out={descriptors}", "mlxd/v1/inference.proto", "mlxd/v1/worker.proto",
    )  # fmt: skip

    assert await asyncio.wait_for(protoc.wait(), PROTOC_TIMEOUT_S) == 0
    assert descriptors.stat().st_size > 0


@pytest.mark.asyncio
@pytest.mark.parametrize("arguments", [(), ("--out",)])
async def test_protos_need_a_folder(arguments: tuple[str, ...]) -> None:
    """Without a folder nothing is written and the usage is shown."""
    ran = await mlxd("protos", *arguments)

    assert ran.code == 2
    assert "--out" in ran.err


@pytest.mark.asyncio
async def test_a_folder_that_cannot_be_is_named(tmp_path: Path) -> None:
    """A path that is a file is an error in one line, without a traceback."""
    taken = tmp_path / "taken"
    taken.write_text("", encoding="utf-8")
    ran = await mlxd("protos", "--out", str(taken))

    assert ran.code == 1
    assert str(taken) in ran.err
    assert len(ran.err.splitlines()) == 1


def test_a_server_may_have_as_many_connections_as_the_system_allows() -> None:
    """What a shell allows a program by itself is soon used up by clients."""
    script = (
        "import resource as r;"
        "from mlxd_controller.cli.commands.serving.serve import allow_open_files;"
        "hard = min(r.getrlimit(r.RLIMIT_NOFILE)[1], 2000);"
        "r.setrlimit(r.RLIMIT_NOFILE, (64, hard)); allow_open_files();"
        "print(r.getrlimit(r.RLIMIT_NOFILE) == (hard, hard))"
    )
    ran = subprocess.run((sys.executable, "-c", script), capture_output=True, check=True)
    assert ran.stdout == b"True\n"
