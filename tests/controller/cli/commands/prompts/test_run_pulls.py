"""`mlxd run ORG/NAME`: a model that is not there is pulled by the server, if its user says so."""

# ruff: noqa: N802 - gRPC names its methods

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from mlxd.v1 import model_pb2
from mlxd_shared.domain.errors import ModelNotFound
from mlxd_shared.wire.interceptors import Context
from tests.controller.cli.commands.prompts.test_run import answer
from tests.fakes import replies
from tests.fakes.mlxd_server import Answers, FakeServer, serving
from tests.support.cli import mlxd
from tests.support.terminal import CTRL_D, XTERM, on_terminal

NAME = "o/m"


class Server(FakeServer):
    """A server that has the model once it was told to pull it."""

    @property
    def pulled(self) -> list[str]:
        """Which models it was told to pull."""
        kind = model_pb2.PullModelRequest
        return [request.model for request in self.requests if isinstance(request, kind)]

    async def LoadModel(
        self, request: model_pb2.LoadModelRequest, context: Context
    ) -> AsyncIterator[model_pb2.LoadModelResponse]:
        """Answer as the cache is."""
        if not self.pulled:
            raise ModelNotFound(request.model, "`mlxd pull` downloads it")
        yield model_pb2.LoadModelResponse(model=replies.model(NAME))


def answers() -> Answers:
    """Return what a server says that can pull the model."""
    return Answers(generate=answer("Hello"), pull=replies.pull_steps(NAME))


@pytest.mark.asyncio
async def test_a_yes_pulls_loads_and_chats() -> None:
    """What is asked names the model and who pulls it; what has come is said."""
    async with serving(answers(), make=Server) as fake:
        chat = on_terminal("run", NAME, "--address", fake.address, term=XTERM)
        async with chat as screen:
            await screen.until_shown("[Y/n]:")
            question = f"{NAME} is not here. Have the server pull it from its hub?"
            assert question in " ".join(screen.shown.split("\n"))
            screen.type("\r")
            await screen.until_shown(f"{NAME} is ready")
            await screen.until_shown(">>>")
            assert f"{NAME} is 1111111111aa: 2 files" in screen.shown
            screen.type("Hi\r")
            await screen.until_shown("Hello")
            await screen.until_shown(lambda shown: shown.rstrip().endswith("\n>>>"))
            screen.type(CTRL_D)
            assert await screen.wait_ended() == 0
    assert isinstance(fake, Server)
    assert fake.pulled == [NAME]


@pytest.mark.asyncio
@pytest.mark.parametrize(("name", "asks"), [(NAME, True), ("nobody", False)])
async def test_without_a_yes_nothing_is_pulled(name: str, asks: bool) -> None:
    """Nor is anybody asked of what no hub has, or where nobody can answer."""
    async with serving(answers(), make=Server) as fake:
        where = ("--address", fake.address)
        async with on_terminal("run", name, *where, term=XTERM) as screen:
            if asks:
                await screen.until_shown("[Y/n]:")
                screen.type("n\r")
            assert await screen.wait_ended() == 3
            assert ("pull it" in screen.screen) is asks
        piped = await mlxd("run", name, "Hi", *where, piped="")
    assert (piped.code, "Have the server" in piped.err) == (3, False)
    assert "`mlxd pull` downloads it" in piped.err
    assert isinstance(fake, Server)
    assert fake.pulled == []
