"""A generation asks as little as it can: a model's way of reading is known before it is asked."""

from __future__ import annotations

import pytest

from mlxd.v1 import inference_pb2
from tests.fakes.mlxd_server import Answers, serving
from tests.fakes.replies import model
from tests.support.gateways import gateway_over
from tests.support.spoken import answer_with_text

BODY = {"model": "demo", "prompt": "Once", "stream": False}


@pytest.mark.asyncio
@pytest.mark.parametrize(("chats", "kind"), [(True, "chat"), (False, "text")])
async def test_a_prompt_is_one_request_whatever_the_model(chats: bool, kind: str) -> None:
    """A chat where it has a template, a text where it has none: never both."""
    known = model()
    known.has_chat_template = chats
    answers = Answers(models=[known], generate=answer_with_text())
    async with serving(answers) as fake, gateway_over(fake.address) as web:
        assert (await web.post("/api/generate", BODY)).status_code == 200
        (request,) = [r for r in fake.requests if isinstance(r, inference_pb2.GenerateRequest)]
        assert request.WhichOneof("prompt") == kind
