"""`mlxd logs`: a worker's lines for people and for programs, followed to their end."""

from __future__ import annotations

import asyncio
import json
import signal

import pytest

from mlxd import Client
from mlxd.v1 import model_pb2
from mlxd_shared.config import LINES_KEPT_MAX
from tests.fakes.mlxd_server import Answers, serving
from tests.support.cli import LIMIT_S, mlxd, start
from tests.support.served import serve

LOADED = json.dumps({"event": "loaded", "level": "info", "timestamp": "12:00", "model": "m"})


def piece(*lines: str, missed: int = 0) -> model_pb2.ReadLogsResponse:
    """A message of the log."""
    return model_pb2.ReadLogsResponse(
        lines=lines, missed_lines=missed, worker_incarnation="i", pid=7
    )


@pytest.mark.asyncio
async def test_lines_are_told_for_people_or_for_programs() -> None:
    """What happened and when; with --json as the worker wrote them. Nothing steers a terminal."""
    pieces = [piece(LOADED, "plain \x1b[2J"), piece("later", missed=3)]
    async with serving(Answers(logs=pieces)) as fake:
        people = await mlxd("logs", "m", "-n", "5", "--address", fake.address)
        programs = await mlxd("logs", "m", "--json", "--address", fake.address)
    assert people.code == 0
    assert people.out.splitlines() == ["12:00 info: loaded (model m)", "plain \\x1b[2J", "later"]
    assert people.err == "mlxd: 3 lines were dropped before these\n"
    assert [each["lines"] for each in programs.objects] == [[LOADED, "plain \x1b[2J"], ["later"]]
    assert fake.requests == [
        model_pb2.ReadLogsRequest(model="m", tail=5), model_pb2.ReadLogsRequest(model="m")
    ]  # fmt: skip


@pytest.mark.asyncio
async def test_following_ends_with_ctrl_c() -> None:
    """Each line is there at once, and the call is cancelled."""
    async with serving(Answers(logs=[piece("one")], hold=True)) as fake:
        process = await start("logs", "m", "-f", "--address", fake.address)
        assert process.stdout is not None
        line = await asyncio.wait_for(process.stdout.readline(), LIMIT_S)
        process.send_signal(signal.SIGINT)
        assert await asyncio.wait_for(process.wait(), LIMIT_S) == 130
        await asyncio.wait_for(fake.left.wait(), LIMIT_S)
    assert line == b"one\n"
    assert fake.requests == [model_pb2.ReadLogsRequest(model="m", follow=True)]


@pytest.mark.asyncio
async def test_too_many_lines_are_refused_before_anybody_is_asked() -> None:
    """With the bound."""
    ran = await mlxd("logs", "m", "-n", str(LINES_KEPT_MAX + 1), "--address", "127.0.0.1:1")
    assert ran.code == 2
    assert f"{LINES_KEPT_MAX}" in ran.err


@pytest.mark.asyncio
async def test_a_real_worker_s_lines_are_read() -> None:
    """From its load to its end, which ends the reading."""
    async with serve() as server, Client(server.address) as client:
        where = ("--address", server.address)
        none = await mlxd("logs", "demo", *where)
        assert (none.code, "demo has no worker" in none.err) == (2, True)
        await client.complete("once", model="demo", max_tokens=1)
        process = await start("logs", "demo", "--follow", *where)
        assert process.stdout is not None
        first = await asyncio.wait_for(process.stdout.readline(), LIMIT_S)
        await client.unload("demo")
        rest, _ = await asyncio.wait_for(process.communicate(), LIMIT_S)
    assert process.returncode == 0
    assert b"info: " in first + rest
