"""What people write and read stays out of the log, unless the operator asks for it."""

from __future__ import annotations

import pytest

from mlxd import Client, SamplingOptions
from tests.support.served import serve

PROMPT = "Once upon a time there was a purple walrus"
GREEDY = SamplingOptions(temperature=0.0)


@pytest.mark.asyncio
async def test_the_log_has_no_content() -> None:
    """Neither the prompt nor the output is in any line, of controller or worker."""
    async with serve("--log-level", "debug") as server, Client(server.address) as client:
        done = await client.complete(PROMPT, sampling=GREEDY, max_tokens=30)
        assert server.find_logged("generate ended")["finish"] == "length"
        log = server.log_path.read_text(encoding="utf-8")
    assert "purple walrus" not in log
    assert done.text.strip()[:20] not in log


@pytest.mark.asyncio
async def test_the_log_has_what_was_asked_for() -> None:
    """With --log-content each request leaves its prompt and its output."""
    async with serve("--log-content") as server, Client(server.address) as client:
        done = await client.complete(PROMPT, sampling=GREEDY, max_tokens=30)
        line = server.find_logged("content")
        assert (line["prompt"], line["output"]) == (PROMPT, done.text)
        assert line["request_id"]
