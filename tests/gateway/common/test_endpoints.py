"""Texts that cannot become vectors are named as the request names them."""

from __future__ import annotations

from typing import Any

import pytest

from mlxd.v1 import inference_pb2
from mlxd_shared.domain.errors import InvalidRequest
from mlxd_shared.wire.interceptors import Context
from tests.fakes.mlxd_server import Answers, FakeServer, serving
from tests.support.gateways import gateway_over


class Refusing(FakeServer):
    """A server that makes no vectors."""

    async def Embed(  # noqa: N802 - gRPC's name
        self, request: inference_pb2.EmbedRequest, context: Context
    ) -> inference_pb2.EmbedResponse:
        """Refuse the last text."""
        raise InvalidRequest.of(f"texts[{len(request.texts) - 1}]", "is too long")


BODIES: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/embeddings", {"input": "a"}, "input"),
    ("/v1/embeddings", {"input": ["a"]}, "input[0]"),
    ("/v1/embeddings", {"input": ["a", "b"]}, "input[1]"),
    ("/api/embed", {"input": "a"}, "input"),
    ("/api/embed", {"input": ["a", "b"]}, "input[1]"),
    ("/api/embeddings", {"prompt": "a"}, "prompt"),
]


@pytest.mark.asyncio
@pytest.mark.parametrize(("path", "body", "field"), BODIES)
async def test_a_text_has_its_fields_name(path: str, body: dict[str, Any], field: str) -> None:
    """One text is the field itself, one of several a place in it."""
    async with serving(Answers(), make=Refusing) as fake, gateway_over(fake.address) as web:
        status, error = await web.error(path, {"model": "demo", **body})
        assert status == 400
        message = error["error"] if path.startswith("/api/") else error["error"]["message"]
        assert message == f"{field}: is too long"
