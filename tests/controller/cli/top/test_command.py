"""`mlxd top` on a terminal: keys, sizes, signals, a server that goes; and what it leaves."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from mlxd.v1 import model_pb2
from mlxd_shared.security.net import parse_address
from mlxd_shared.serving.server import Health, listen, make_server
from tests.fakes import replies
from tests.fakes.mlxd_server import Answers, FakeServer, serving
from tests.support.cli import mlxd
from tests.support.terminal import CTRL_C, SMALL, USUAL, XTERM, Terminal, on_terminal

OTHER_SCREEN, OWN_SCREEN, CURSOR = "\x1b[?1049h", "\x1b[?1049l", "\x1b[?25h"
KEYS = "q quit"


def answers() -> Answers:
    """A server with two models in memory and one that failed."""
    known = [
        replies.model(),
        replies.model("org/" + "x" * 60, state="LOADING"),
        replies.model("bad", state="FAILED", error="it died of hunger"),
    ]
    return Answers(
        models=known,
        page_size=9,
        statuses=[replies.status()] * 2,
        hold=True,
        unload=model_pb2.UnloadModelResponse(model=replies.model(state="UNLOADED")),
    )


@asynccontextmanager
async def on_top(
    fake: FakeServer, size: tuple[int, int] = USUAL
) -> AsyncIterator[tuple[Terminal, list[object]]]:
    """`mlxd top` with its first frame, and the terminal's modes before it."""
    top = on_terminal("top", "--address", fake.address, term=XTERM, size=size)
    async with top as terminal:
        before = terminal.modes
        await terminal.until_shown(KEYS)
        assert terminal.modes != before
        yield terminal, before


def check_given_back(terminal: Terminal, before: list[object]) -> None:
    """The terminal is as it was: modes, screen and cursor, and there is no traceback."""
    assert terminal.modes == before
    assert terminal.screen.count(OTHER_SCREEN) == terminal.screen.count(OWN_SCREEN) == 1
    assert CURSOR in terminal.screen.rpartition(OWN_SCREEN)[0][-200:] + terminal.screen[-40:]
    assert "Traceback" not in terminal.screen


@pytest.mark.asyncio
@pytest.mark.parametrize("size", [USUAL, SMALL])
async def test_every_key_at_both_sizes(size: tuple[int, int]) -> None:
    """Choose, sort, unload with a word before it, and quit; nothing is broken anywhere."""
    async with serving(answers()) as fake, on_top(fake, size) as (terminal, before):
        await terminal.until_shown("> bad")
        assert "it died of hunger" in terminal.shown
        terminal.type("j")
        await terminal.until_shown("> demo")
        terminal.type("s")
        await terminal.until_shown("sorted by tokens/s")
        terminal.type("\x1b[B")
        await terminal.until_shown("> org/x")
        terminal.type("\x1b[Au")
        await terminal.until_shown("unload demo?  y: yes")
        terminal.type("n")
        await terminal.until_shown("demo stays")
        terminal.type("uy")
        await terminal.until_shown("demo is unloaded")
        assert max(map(len, terminal.display)) <= size[0]
        assert len(terminal.display) == size[1]
        terminal.type("q")
        assert await terminal.wait_ended() == 0
        check_given_back(terminal, before)
    assert model_pb2.UnloadModelRequest(model="demo") in fake.requests


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("ending", "code"),
    [(CTRL_C, 130), (signal.SIGTERM, -signal.SIGTERM), (signal.SIGHUP, -signal.SIGHUP)],
)
async def test_the_terminal_is_given_back(ending: str | signal.Signals, code: int) -> None:
    """Whatever ends the command, which ends as by that."""
    async with serving(answers()) as fake, on_top(fake) as (terminal, before):
        if isinstance(ending, str):
            terminal.type(ending)
        else:
            terminal.process.send_signal(ending)
        assert await terminal.wait_ended() == code
        check_given_back(terminal, before)


@pytest.mark.asyncio
async def test_another_size_is_another_frame() -> None:
    """At once; one that is too small says so, and the next one is whole again."""
    async with serving(answers()) as fake, on_top(fake) as (terminal, _):
        terminal.resize(30, 10)
        await terminal.until_shown("too small: 40x8 is needed")
        terminal.resize(*SMALL)
        await terminal.until_shown(
            lambda shown: shown.count("\n") == SMALL[1] - 1 and KEYS in shown
        )
        terminal.type("q")
        assert await terminal.wait_ended() == 0


@pytest.mark.asyncio
async def test_a_server_that_goes_is_said_and_found_again() -> None:
    """The last figures stay meanwhile."""
    async with serving(answers()) as fake:
        address = fake.address
        top = on_terminal("top", "--address", address, term=XTERM)
        terminal = await top.__aenter__()
        await terminal.until_shown(KEYS)
    try:
        await terminal.until_shown("does not answer")
        assert "> bad" in terminal.shown
        again = make_server(Health(), (), calls_max=None)
        fresh = FakeServer(answers())
        fresh.answers.models = [replies.model("anew")]
        add_services(fresh, again)
        assert listen(again, parse_address(address)) == address
        await again.start()
        await terminal.until_shown("> anew")
        assert "does not answer" not in terminal.shown
        terminal.type("q")
        assert await terminal.wait_ended() == 0
        await again.stop(None)
    finally:
        await top.__aexit__(None, None, None)


def add_services(fake: FakeServer, server: object) -> None:
    """Have a server serve the fake's models and statuses."""
    from mlxd.v1 import model_pb2_grpc, status_pb2_grpc  # noqa: PLC0415 - here alone

    model_pb2_grpc.add_ModelServiceServicer_to_server(fake, server)  # type: ignore[arg-type]
    status_pb2_grpc.add_StatusServiceServicer_to_server(fake, server)  # type: ignore[arg-type]


@pytest.mark.asyncio
async def test_the_help_speaks_of_no_option_that_there_is_not() -> None:
    """`--interval` is of a view that always watches."""
    ran = await mlxd("top", "--help")
    assert ran.code == 0
    assert "--interval" in ran.out
    assert "--watch" not in ran.out


@pytest.mark.asyncio
async def test_without_a_terminal_or_a_server_there_is_no_view() -> None:
    """In one line, and at once."""
    async with serving(answers()) as fake:
        piped = await mlxd("top", "--address", fake.address)
    assert piped.code == 2
    assert "mlxd top needs a terminal" in piped.err
    async with on_terminal("top", "--address", "127.0.0.1:1", term=XTERM) as terminal:
        assert await terminal.wait_ended() == 4
        assert "no server answers at 127.0.0.1:1" in terminal.screen
        assert OTHER_SCREEN not in terminal.screen
    async with on_terminal("top", "--interval", "0", term=XTERM) as terminal:
        assert await terminal.wait_ended() == 2
        assert "--interval" in terminal.screen
