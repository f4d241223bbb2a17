"""`mlxd pull`: by the server that is reached, or here; what is printed, and each exit code."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from mlxd.v1 import model_pb2
from mlxd_controller.cli.commands.models.pull import describe_pulled
from mlxd_shared.domain.errors import ExtraMissing, HubDenied, HubUnavailable, ModelNotFound
from mlxd_shared.domain.pulls import PulledModel
from mlxd_shared.wire.status import RemoteError
from tests.fakes import replies
from tests.fakes.mlxd_server import Answers, serving
from tests.support import hub_server
from tests.support.cli import mlxd
from tests.support.hub_server import FakeHub, Repository
from tests.support.made_stores import commit_of
from tests.support.tiny_model import write_tiny_model

COMMIT = commit_of("1")


@pytest.fixture(name="hub")
def hub_with_a_model(tmp_path: Path) -> Iterator[FakeHub]:
    """A hub that has one tiny model."""
    folder = write_tiny_model(tmp_path / "tiny")
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    with hub_server.serving(FakeHub({"o/m": Repository(COMMIT, files)})) as hub:
        yield hub


def variables(hub: FakeHub, tmp_path: Path) -> dict[str, Any]:
    """Return the variables of who pulls from this hub, where no server listens."""
    return {
        "HF_ENDPOINT": hub.endpoint,
        "HF_HUB_OFFLINE": "0",
        "MLXD_HUB_CACHE": str(tmp_path / "cache"),
        "MLXD_ADDRESS": f"unix:{tmp_path}/none",
    }


@pytest.mark.asyncio
async def test_without_a_server_the_command_pulls(hub: FakeHub, tmp_path: Path) -> None:
    """HF_ENDPOINT and the cache's variables are honoured, and exit codes say why."""
    set_up = variables(hub, tmp_path)
    done = await mlxd("pull", "o/m", "--json", **set_up)
    assert (done.code, done.err) == (0, done.err)
    (summary,) = done.objects
    assert (summary["commit"], Path(summary["path"]).name) == (COMMIT, COMMIT)
    assert Path(summary["path"]).is_relative_to(tmp_path / "cache")
    missing = await mlxd("pull", "o/none", **set_up)
    assert missing.code == 3
    assert "no model 'o/none'" in missing.err
    for bad in ("../x", "o/m@"):
        assert (await mlxd("pull", "--", bad, **set_up)).code == 2


@pytest.mark.asyncio
async def test_a_server_that_is_reached_pulls(tmp_path: Path) -> None:
    """It is sent all that was asked for, and what it says is printed; nothing is done here."""
    nowhere: dict[str, Any] = {
        "HF_ENDPOINT": "http://127.0.0.1:9",
        "MLXD_HUB_CACHE": str(tmp_path / "cache"),
    }
    async with serving(Answers(pull=replies.pull_steps())) as fake:
        where = ("--address", fake.address)
        as_text = await mlxd("pull", "o/m@v1", "--include", "*.md", *where, **nowhere)
        as_json = await mlxd("pull", "o/m@v1", "--json", *where, **nowhere)

    assert as_text.out == "o/m@v1 is 1111111111aa: 2 files, 3.0 MiB, in /hub/snapshots/1\n"
    assert "o/m@v1: looking\no/m@v1: model.safetensors\n" in as_text.err
    (summary,) = as_json.objects
    assert (summary["name"], summary["digest"], summary["nbytes"]) == ("o/m@v1", "d1", 3 << 20)
    assert fake.requests == [
        model_pb2.PullModelRequest(model="o/m@v1", include=["*.md"]),
        model_pb2.PullModelRequest(model="o/m@v1"),
    ]
    assert not (tmp_path / "cache").exists()


@pytest.mark.asyncio
async def test_a_cache_that_is_named_is_filled_here(hub: FakeHub, tmp_path: Path) -> None:
    """Whatever server is there: only this machine knows the folder."""
    own = tmp_path / "own"
    async with serving(Answers()) as fake:
        done = await mlxd(
            "pull", "o/m", "--hub-cache", str(own), "--json",
            **variables(hub, tmp_path) | {"MLXD_ADDRESS": fake.address},
        )  # fmt: skip
    assert Path(done.objects[0]["path"]).is_relative_to(own)
    assert fake.requests == []


@pytest.mark.asyncio
async def test_a_server_elsewhere_that_does_not_answer_is_an_error(
    hub: FakeHub, tmp_path: Path
) -> None:
    """Its disk was meant, not this one."""
    elsewhere = variables(hub, tmp_path) | {"MLXD_ADDRESS": "0.0.0.0:9"}
    done = await mlxd("pull", "o/m", **elsewhere)
    assert done.code == 4
    assert "0.0.0.0:9" in done.err
    assert hub.requested == []


def end_in_order(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Close a connection."""
    writer.close()


def reset(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Close a connection as the system does for what was not read."""
    linger = struct.pack("ii", 1, 0)
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    writer.transport.abort()


@pytest.mark.asyncio
@pytest.mark.parametrize("end", [end_in_order, reset])
async def test_a_server_that_hangs_up_is_an_error(
    end: Callable[[asyncio.StreamReader, asyncio.StreamWriter], None], hub: FakeHub, tmp_path: Path
) -> None:
    """Something listens that was meant: with TLS, for one, and without --tls-ca."""
    hanging_up = await asyncio.start_server(end, "127.0.0.1", 0)
    async with hanging_up:
        address = f"127.0.0.1:{hanging_up.sockets[0].getsockname()[1]}"
        done = await mlxd("pull", "o/m", **variables(hub, tmp_path) | {"MLXD_ADDRESS": address})
    assert (done.code, "hangs up" in done.err) == (4, True)
    assert hub.requested == []


@pytest.mark.asyncio
async def test_a_server_that_goes_in_the_midst_is_an_error(hub: FakeHub, tmp_path: Path) -> None:
    """What it had begun is in its own cache; nothing is put beside that without a word."""
    gone = RemoteError(grpc.StatusCode.UNAVAILABLE, "Connection reset by peer")
    async with serving(Answers(pull=[replies.pull_steps()[0], gone])) as fake:
        where = variables(hub, tmp_path) | {"MLXD_ADDRESS": fake.address}
        done = await mlxd("pull", "o/m", **where)
    assert (done.code, done.out) == (4, "")
    assert hub.requested == []


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ModelNotFound("o/m", "the hub has none"), 3),
        (HubUnavailable("no answer"), 4),
        (HubDenied("gated"), 1),
        (ExtraMissing("pulling", "hub"), 1),
    ],
)
async def test_a_refusal_of_the_server_is_the_end(error: Any, code: int, tmp_path: Path) -> None:
    """Its sentence on stderr, its exit code; the command does not try by itself."""
    async with serving(Answers(pull=[error])) as fake:
        done = await mlxd("pull", "o/m", MLXD_ADDRESS=fake.address)
    assert (done.code, done.out) == (code, "")
    assert error.describe() in done.err


def test_what_a_server_has_pulled_steers_no_terminal() -> None:
    """Name and path are another machine's words."""
    pulled = PulledModel("o/m", "o/m", "main", "0" * 40, "/c\x1b[2J\n", "", 1, 1)
    said = describe_pulled(pulled)
    assert said.isprintable()
    assert said.endswith(r"/c\x1b[2J\x0a")
