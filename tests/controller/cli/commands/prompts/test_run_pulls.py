"""`mlxd run ORG/NAME`: a model that is not here is pulled, if its user says so."""

# ruff: noqa: N802 - gRPC names its methods

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from mlxd.v1 import model_pb2
from mlxd_shared.domain.errors import ModelNotFound
from mlxd_shared.wire.interceptors import Context
from tests.controller.cli.commands.prompts.test_run import answer
from tests.fakes import replies
from tests.fakes.mlxd_server import Answers, FakeServer, serving
from tests.support import hub_server
from tests.support.cli import mlxd
from tests.support.hub_server import FakeHub, Repository
from tests.support.made_stores import commit_of
from tests.support.terminal import CTRL_D, XTERM, on_terminal
from tests.support.tiny_model import write_tiny_model

NAME = "o/m"


class Server(FakeServer):
    """A server that has the model once it is in the cache."""

    cache = Path()

    async def LoadModel(
        self, request: model_pb2.LoadModelRequest, context: Context
    ) -> AsyncIterator[model_pb2.LoadModelResponse]:
        """Answer as the cache is."""
        if not list(self.cache.glob("models--*/snapshots/*/model.safetensors")):
            raise ModelNotFound(request.model, "`mlxd pull` downloads it")
        yield model_pb2.LoadModelResponse(model=replies.model(NAME))


@pytest.fixture(name="hub")
def hub_with_a_model(tmp_path: Path) -> Iterator[FakeHub]:
    """A hub that has one tiny model."""
    folder = write_tiny_model(tmp_path / "tiny")
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    with hub_server.serving(FakeHub({NAME: Repository(commit_of("1"), files)})) as served:
        yield served


def settings(hub: FakeHub, tmp_path: Path) -> dict[str, Any]:
    """The variables of who pulls from this hub into a cache of its own."""
    Server.cache = tmp_path / "cache"
    return {"HF_ENDPOINT": hub.endpoint, "MLXD_HUB_CACHE": str(Server.cache)}


@pytest.mark.asyncio
async def test_a_yes_pulls_loads_and_chats(hub: FakeHub, tmp_path: Path) -> None:
    """What is asked names the model and the hub."""
    environment = settings(hub, tmp_path)
    async with serving(Answers(generate=answer("Hello")), make=Server) as fake:
        chat = on_terminal("run", NAME, "--address", fake.address, term=XTERM,
                           environment=environment)  # fmt: skip
        async with chat as screen:
            await screen.until_shown("Pull it from")
            assert f"{NAME} is not here. Pull it from {hub.endpoint}?" in " ".join(
                screen.shown.split("\n")
            )
            screen.type("\r")
            await screen.until_shown(f"{NAME} is ready")
            await screen.until_shown(">>>")
            screen.type("Hi\r")
            await screen.until_shown("Hello")
            await screen.until_shown(lambda shown: shown.rstrip().endswith("\n>>>"))
            screen.type(CTRL_D)
            assert await screen.wait_ended() == 0


@pytest.mark.asyncio
@pytest.mark.parametrize(("name", "asks"), [(NAME, True), ("nobody", False)])
async def test_without_a_yes_nothing_is_pulled(
    hub: FakeHub, tmp_path: Path, name: str, asks: bool
) -> None:
    """Nor is anybody asked of what no hub has, or where nobody can answer."""
    environment = settings(hub, tmp_path)
    async with serving(Answers(), make=Server) as fake:
        where = ("--address", fake.address)
        async with on_terminal("run", name, *where, term=XTERM, environment=environment) as screen:
            if asks:
                await screen.until_shown("[Y/n]:")
                screen.type("n\r")
            assert await screen.wait_ended() == 3
            assert ("Pull it" in screen.screen) is asks
        piped = await mlxd("run", name, "Hi", *where, piped="", **environment)
    assert (piped.code, "Pull it" in piped.err) == (3, False)
    assert "`mlxd pull` downloads it" in piped.err
    assert not hub.requested
