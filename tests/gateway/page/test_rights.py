"""What a caller may do is found out without doing it."""
# ruff: noqa: N802 - gRPC names its methods

from __future__ import annotations

from itertools import product

import pytest

from mlxd import Client, RemoteError
from mlxd.v1 import inference_pb2, model_pb2, status_pb2
from mlxd_gateway.page.rights import Rights, find_rights
from mlxd_shared.domain.errors import InvalidRequest, NotAllowed
from mlxd_shared.wire.interceptors import Context
from tests.fakes.mlxd_server import Answers, FakeServer, serving
from tests.fakes.replies import status
from tests.support.gateways import gateway_over


class Strict(FakeServer):
    """Answers as a controller does: the scope is judged first, and then what is asked."""

    scopes: frozenset[str] = frozenset()

    def _judge(self, scope: str) -> None:
        if scope not in self.scopes:
            raise NotAllowed("reader", f"calls that need the scope {scope}")

    async def Embed(
        self, request: inference_pb2.EmbedRequest, context: Context
    ) -> inference_pb2.EmbedResponse:
        self._judge("infer")
        assert not request.texts
        raise InvalidRequest.of("texts", "1 to 256 texts")

    async def UnloadModel(
        self, request: model_pb2.UnloadModelRequest, context: Context
    ) -> model_pb2.UnloadModelResponse:
        self._judge("manage")
        assert not request.model
        raise InvalidRequest.of("model", "is required")

    async def GetStatus(
        self, request: status_pb2.GetStatusRequest, context: Context
    ) -> status_pb2.GetStatusResponse:
        self._judge("observe")
        return status_pb2.GetStatusResponse(status=status())


@pytest.mark.asyncio
async def test_each_scope_by_itself() -> None:
    """All eight sets of scopes are told apart; what is asked names no model and no text."""
    async with serving(Answers(), make=Strict) as fake, Client(fake.address) as client:
        assert isinstance(fake, Strict)
        for flags in product((False, True), repeat=3):
            names = zip(("infer", "observe", "manage"), flags, strict=True)
            fake.scopes = frozenset(name for name, has in names if has)
            assert await find_rights(client) == Rights(*flags)


@pytest.mark.asyncio
async def test_where_no_controller_answers_nothing_is_known() -> None:
    """That is no right and no want of one: the page waits and asks again."""
    async with Client("127.0.0.1:1") as client:
        with pytest.raises(RemoteError):
            await find_rights(client)
    async with gateway_over("127.0.0.1:1") as web:
        assert (await web.http.get("/page/api/session")).status_code == 503
