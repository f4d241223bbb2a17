"""A server that a command starts because it needs one: with a word, here alone, and only if so."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import psutil
import pytest

from mlxd import Client
from mlxd_controller.cli.background.starting import ensure_server
from mlxd_controller.cli.security import Server
from mlxd_shared.security.secure_channel import PLAIN
from tests.support.certificates import Authority
from tests.support.cli import LIMIT_S, Ran, mlxd
from tests.support.ports import own_port

ALLOWED: dict[str, Any] = {"MLXD_START": "true"}
NOTHING_THERE = "mlxd: no server answers at"


async def end_server(address: str) -> None:
    """End the server at an address, and wait until it has ended."""
    async with Client(address) as client:
        process = psutil.Process((await client.status()).pid)
    process.terminate()
    async with asyncio.timeout(LIMIT_S):
        await asyncio.to_thread(process.wait)


@pytest.mark.asyncio
async def test_a_command_that_needs_a_server_starts_one(tmp_path: Path) -> None:
    """It says so on stderr, with how to keep it from that; stdout has the answer alone.

    The next command finds the server, and says nothing.
    """
    state = ALLOWED | {"XDG_STATE_HOME": str(tmp_path)}
    with own_port() as address:
        ask = ("tokenize", "demo", "Once", "--address", address)
        first = await mlxd(*ask, **state)
        try:
            second = await mlxd(*ask, **state)
        finally:
            await end_server(address)
    assert (first.code, second.code) == (0, 0), first.err
    assert first.out == second.out != ""
    assert first.err.startswith(
        f"{NOTHING_THERE} {address}: starting one in the background (`--no-start`, or"
    )
    (log,) = (tmp_path / "mlxd").glob("*.log")
    assert first.err.endswith(f"mlxd: serving; log {log}\n")
    assert second.err == ""


async def check_nothing_started(ran: Ran) -> None:
    """The command ended as without a server, and said nothing of a start."""
    assert ran.code == 4
    assert "starting" not in ran.err
    assert ran.out == ""


@pytest.mark.asyncio
async def test_where_none_is_started(tmp_path: Path) -> None:
    """Switched off by option, variable and file; for what only looks; elsewhere, or over TLS."""
    file = tmp_path / "config.toml"
    file.write_text("[client]\nstart = false\n")
    ca = Authority(tmp_path).path
    ask = ("tokenize", "demo", "Once")
    with own_port() as address:
        where = ("--address", address)
        await check_nothing_started(await mlxd(*ask, "--no-start", *where, **ALLOWED))
        await check_nothing_started(await mlxd(*ask, *where, MLXD_START="false"))
        by_file: dict[str, Any] = {"MLXD_CONFIG": str(file), "MLXD_START": ""}
        await check_nothing_started(await mlxd(*ask, *where, **by_file))
        await check_nothing_started(await mlxd(*ask, "--tls-ca", str(ca), *where, **ALLOWED))
        for command in (("ps",), ("show", "demo"), ("fit", "demo")):
            await check_nothing_started(await mlxd(*command, *where, **ALLOWED))


@pytest.mark.asyncio
async def test_none_is_started_for_a_command_line_that_is_wrong() -> None:
    """It is refused first; nor is one for an address that would lead nobody to it."""
    with own_port() as address:
        for wrong in (
            ("run", "demo"),  # neither a prompt nor a terminal
            ("run", "demo", "Hi", "--set", "nothing"),
            ("run", "demo", "Hi", "--tools", "/nobody/has/this"),
            ("load", "demo", "--logit-bias", "x"),
            ("score", "demo", "Hi", "you", "--instruction", "x"),
        ):
            ran = await mlxd(*wrong, "--address", address, **ALLOWED)
            assert ran.code == 2, ran
            assert "starting" not in ran.err
    await check_nothing_started(
        await mlxd("tokenize", "demo", "Once", "--address", "127.0.0.1:0", **ALLOWED)
    )


@pytest.mark.asyncio
async def test_commands_at_once_start_one_server(tmp_path: Path) -> None:
    """The second one waits for the first one's, and says nothing of a start."""
    state = ALLOWED | {"XDG_STATE_HOME": str(tmp_path)}
    with own_port() as address:
        ask = ("tokenize", "demo", "Once", "--address", address)
        both = await asyncio.gather(mlxd(*ask, **state), mlxd(*ask, **state))
        await end_server(address)
    assert [ran.code for ran in both] == [0, 0], both
    assert sorted("starting" in ran.err for ran in both) == [False, True]
    assert (tmp_path / "mlxd").stat().st_mode & 0o077 == 0


def test_none_is_started_for_a_server_elsewhere(capsys: pytest.CaptureFixture[str]) -> None:
    """Whether it answers is not even looked at: a name may lead anywhere."""
    ensure_server(Server("192.0.2.1:8555", PLAIN))
    ensure_server(Server("example.invalid:8555", PLAIN))
    assert capsys.readouterr() == ("", "")


@pytest.mark.asyncio
async def test_a_start_that_fails_ends_the_command(tmp_path: Path) -> None:
    """With what the server said; nothing is left behind."""
    state = ALLOWED | {"XDG_STATE_HOME": str(tmp_path), "MLXD_PRELOAD": "nobody"}
    with own_port() as address:
        ran = await mlxd("tokenize", "demo", "Once", "--address", address, **state)
    assert ran.code == 3
    assert "no model 'nobody'" in ran.err
    assert ran.err.endswith("mlxd: the server could not be started; see the lines above\n")
    assert ran.out == ""
