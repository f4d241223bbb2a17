"""`--watch` on a real terminal, at both sizes: whole words, until a key or the server ends it."""

from __future__ import annotations

import pytest

from tests.fakes import replies
from tests.fakes.mlxd_server import Answers, serving
from tests.support.cli import mlxd
from tests.support.terminal import CTRL_C, SMALL, USUAL, XTERM, on_terminal

INTERVAL = ("--interval", "100ms")


def answers() -> Answers:
    """Two models in memory, one of a long name; a status that goes on."""
    known = [replies.model(), replies.model("organisation/a-name-of-some-length", state="LOADING")]
    return Answers(models=known, page_size=9, statuses=[replies.status()] * 3, hold=True)


@pytest.mark.asyncio
@pytest.mark.parametrize("size", [USUAL, SMALL])
@pytest.mark.parametrize("command", ["ps", "status"])
async def test_words_are_whole_at_both_sizes(command: str, size: tuple[int, int]) -> None:
    """Each that is seen is one of those that a pipe gets, but for a name that has lost its middle.

    Ctrl-C ends it, without a traceback.
    """
    async with serving(answers()) as fake:
        where = ("--address", fake.address)
        words = set((await mlxd(command, *where)).out.split())
        watch = on_terminal(command, "--watch", *INTERVAL, *where, term=XTERM, size=size)
        async with watch as terminal:
            shown = await terminal.until_shown("loading" if command == "ps" else "going down")
            assert await terminal.ended_by(CTRL_C) == 130
            assert "Traceback" not in terminal.screen
    seen = [word for word in shown.split() if word != "^C"]
    assert seen
    assert [word for word in seen if word not in words and "…" not in word] == []


@pytest.mark.asyncio
@pytest.mark.parametrize("command", ["ps", "status"])
async def test_a_server_that_ends_ends_the_watch(command: str) -> None:
    """In one line on stderr, with the code of a server that is not there."""
    async with serving(answers()) as fake:
        watch = on_terminal(command, "--watch", *INTERVAL, "--address", fake.address, term=XTERM)
        terminal = await watch.__aenter__()
        await terminal.until_shown("demo")
    try:
        assert await terminal.wait_ended() in {1, 4}
        assert "mlxd: " in terminal.screen
        assert "Traceback" not in terminal.screen
    finally:
        await watch.__aexit__(None, None, None)
