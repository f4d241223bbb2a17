"""What people type: other names of commands, forms of lists, lists that go on, names completed."""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
from pathlib import Path

import pytest

from mlxd.v1 import model_pb2
from tests.fakes import replies
from tests.fakes.mlxd_server import Answers, serving
from tests.support.cli import LIMIT_S, clean_environment, mlxd, start
from tests.support.terminal import on_terminal

CLEAR = "\x1b[2J\x1b[H"
MLXD = Path(sys.executable).parent / "mlxd"


@pytest.mark.asyncio
async def test_other_names_are_the_same_commands() -> None:
    """`list`, `ls`, `stop` and `rm`, with their options; the help names them."""
    async with serving(Answers(models=[replies.model()], page_size=9)) as fake:
        where = ("--address", fake.address)
        lists = [await mlxd(name, *where) for name in ("models", "list", "ls")]
        stop, rm = await mlxd("stop", "m", "--force", *where), await mlxd("rm", "n", *where)
    assert len({ran.out for ran in lists}) == 1
    assert [ran.code for ran in (*lists, stop, rm)] == [0] * 5
    assert fake.requests[-2:] == [
        model_pb2.UnloadModelRequest(model="m", force=True),
        model_pb2.ForgetModelRequest(name="n"),
    ]
    shown = await mlxd("--help")
    assert "list and ls for models, stop for unload, rm for forget" in " ".join(shown.out.split())


@pytest.mark.asyncio
async def test_a_wide_list_leaves_no_column_out() -> None:
    """Though the terminal has no room for it; `-o json` is --json."""
    known = [replies.model("org/" + "x" * 60)]
    async with serving(Answers(models=known)) as fake:
        where = ("--address", fake.address)
        async with on_terminal("models", "-o", "wide", *where) as wide:
            assert await wide.wait_ended() == 0
        for command in ("models", "ps"):
            named, flag = (
                await mlxd(command, "-o", "json", *where),
                await mlxd(command, "--json", *where),
            )
            assert named.out == flag.out != ""
    assert "/models/org/xxx" in wide.screen
    assert "DIGEST" in wide.screen


@pytest.mark.asyncio
async def test_a_list_goes_on_until_ctrl_c() -> None:
    """Each look in place of the last one on a terminal; one object a look as JSON."""
    async with serving(Answers(models=[replies.model()])) as fake:
        look = ("ps", "--watch", "--interval", "100ms", "--address", fake.address)
        async with on_terminal(*look) as terminal:
            for _ in range(3):
                await terminal.until(CLEAR)
            await terminal.until("demo")
            assert await terminal.ended_by("\x03") == 130
        process = await start(*look, "-o", "json")
        assert process.stdout is not None
        lines = [await asyncio.wait_for(process.stdout.readline(), LIMIT_S) for _ in range(2)]
        process.send_signal(signal.SIGINT)
        assert await asyncio.wait_for(process.wait(), LIMIT_S) == 130
    assert lines[0] == lines[1] != b""
    bad = await mlxd("ps", "--watch", "--interval", "1ms", "--address", "127.0.0.1:1")
    assert (bad.code, bad.err) == (2, "mlxd: --interval: at least 0.1s, and not for ever\n")


async def complete(typed: str, word: int, **environment: str) -> list[str]:
    """What bash is offered for a word; nothing is said besides."""
    variables = {"_MLXD_COMPLETE": "complete_bash", "COMP_WORDS": typed, "COMP_CWORD": str(word)}
    process = await asyncio.create_subprocess_exec(
        MLXD, env=clean_environment() | variables | environment,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    out, err = await asyncio.wait_for(process.communicate(), LIMIT_S)
    assert (process.returncode, err) == (0, b"")
    return out.decode().split()


@pytest.mark.asyncio
async def test_names_of_models_are_completed() -> None:
    """Names and aliases that begin so, for each command that takes one, by whatever address."""
    known = [replies.model(), replies.model("org/demo-2"), replies.model("other")]
    async with serving(Answers(models=known)) as fake:
        for command in ("load", "unload", "stop", "run", "generate", "tokenize", "fit", "embed",
                        "score", "logs", "status", "bench"):  # fmt: skip
            offered = await complete(f"mlxd {command} o", 2, MLXD_ADDRESS=fake.address)
            assert offered == ["org/demo-2", "other"], command
        launched = await complete("mlxd launch codex o", 3, MLXD_ADDRESS=fake.address)
        everything = await complete(f"mlxd --address {fake.address} load ", 4)
        behind = await complete(f"mlxd load --address {fake.address} t", 4)
    assert launched == ["org/demo-2", "other"]
    assert everything == ["demo", "org/demo-2", "other", "tiny"]
    assert behind == ["tiny"]


@pytest.mark.asyncio
async def test_without_a_server_nothing_is_offered_and_nothing_said() -> None:
    """Nobody listens, somebody says nothing, the file or the token is wrong."""
    nowhere = {"MLXD_ADDRESS": "127.0.0.1:1"}
    wrongs: list[dict[str, str]] = [
        {}, {"MLXD_ADDRESS": "nonsense"}, {"MLXD_TOKEN_FILE": "/no/such/file"},
        {"MLXD_CONFIG": "/no/such/file"},
    ]  # fmt: skip
    for wrong in wrongs:
        assert await complete("mlxd load d", 2, **nowhere | wrong) == []
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        assert await complete("mlxd load d", 2, MLXD_ADDRESS=address) == []
