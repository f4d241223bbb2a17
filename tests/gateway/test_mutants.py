"""Bodies with one place changed: answered or refused, never with an error of ours."""

from __future__ import annotations

import random

import pytest

from tests.fakes.mlxd_server import Answers, serving
from tests.fakes.replies import model, pull_steps
from tests.support.effort import examples
from tests.support.gateways import gateway_over
from tests.support.http_bodies import BODIES, mutate
from tests.support.spoken import answer_with_text

ROUNDS = examples(15)


@pytest.mark.asyncio
@pytest.mark.parametrize("path", BODIES)
async def test_no_body_is_our_error(path: str) -> None:
    """200 or a status of 4xx with an error that is JSON; the next good request is answered."""
    rng = random.Random(path)
    known = model()
    known.has_chat_template = True
    answers = Answers(generate=answer_with_text(), models=[known], pull=pull_steps())
    async with serving(answers) as fake, gateway_over(fake.address) as web:
        for _ in range(ROUNDS):
            body = mutate(path, rng)
            answer = await web.post(path, body)
            assert answer.status_code in (200, 400, 404), (body, answer.text)
            if answer.status_code != 200:
                assert {"error", "message"} & set(answer.json())
        good = await web.post("/v1/completions", {"model": "demo", "prompt": "a"})
        assert good.status_code == 200
