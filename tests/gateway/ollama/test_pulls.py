"""Ollama's pulls over a scripted controller: the lines, the refusals, and who ends what."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx2
import pytest

from mlxd import Client
from mlxd.v1 import model_pb2
from mlxd_gateway.app import make_app
from mlxd_gateway.common.clients import Clients
from mlxd_gateway.door import Door
from mlxd_gateway.process import listen_on, make_server
from mlxd_shared.domain.errors import (
    ExtraMissing,
    HubDenied,
    HubUnavailable,
    MlxdError,
    ModelNotFound,
    NotAllowed,
    PullFailed,
    PullInterrupted,
    QueueFull,
    StoreFull,
)
from mlxd_shared.security.listeners import OPEN
from mlxd_shared.security.net import parse_address
from tests.fakes.mlxd_server import Answers, serving
from tests.fakes.replies import MIB, pull_steps
from tests.support.gateways import gateway_over

DIGEST = f"sha256:{'ab' * 32}"
LINES: list[dict[str, Any]] = [
    {"status": "pulling manifest"},
    {"status": "pulling abababababab", "digest": DIGEST, "total": 2 * MIB, "completed": MIB},
    {"status": "verifying sha256 digest"},
    {"status": "writing manifest"},
    {"status": "success"},
]
MANY_TIMES = model_pb2.PullModelResponse(phase=model_pb2.PullModelResponse.PHASE_WAITING)


def lines_in(text: str) -> list[dict[str, Any]]:
    """Return the lines of a stream."""
    return [json.loads(line) for line in text.splitlines()]


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("field", "name"), [("model", "o/m:latest"), ("name", "hf.co/o/m"), ("model", "o/m")]
)
async def test_a_pull_is_told_line_by_line(field: str, name: str) -> None:
    """In the words of Ollama's own server; a line that says nothing new is not said again."""
    steps = [MANY_TIMES, MANY_TIMES, *pull_steps()]
    async with serving(Answers(pull=steps)) as fake, gateway_over(fake.address) as web:
        answer = await web.post("/api/pull", {field: name})
    assert answer.headers["content-type"] == "application/x-ndjson"
    assert lines_in(answer.text) == LINES
    assert fake.requests == [model_pb2.PullModelRequest(model="o/m")]


@pytest.mark.asyncio
async def test_one_word_at_the_end() -> None:
    """Without a stream the answer is the last line's; a file's git hash is named as one."""
    git = model_pb2.PullModelResponse(
        phase=model_pb2.PullModelResponse.PHASE_DOWNLOADING, file="a.json", file_digest="git:ab12"
    )
    answers = Answers(pull=[git, *pull_steps()])
    async with serving(answers) as fake, gateway_over(fake.address) as web:
        whole = await web.post("/api/pull", {"model": "o/m", "stream": False})
        first = lines_in((await web.post("/api/pull", {"model": "o/m"})).text)[0]
    assert whole.json() == {"status": "success"}
    assert first == {"status": "pulling a.json", "digest": "git:ab12", "total": 0, "completed": 0}


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ModelNotFound("o/m", "the hub has none"), 404),
        (HubDenied("o/m is gated"), 403),
        (NotAllowed("writer", "calls that need the scope manage"), 403),
        (StoreFull("the disk is full"), 507),
        (ExtraMissing("pulling", "hub"), 501),
        (PullFailed("no"), 502),
        (HubUnavailable("no answer", 7.0), 503),
        (PullInterrupted("cut off"), 503),
        (QueueFull("downloads", 8), 429),
    ],
)
async def test_a_refusal_has_its_status_or_is_a_line(error: MlxdError, status: int) -> None:
    """A status while nothing has been sent, streamed or not; a line behind a file's."""
    listing, file, *_ = pull_steps()
    early = Answers(pull=[listing, error])
    async with serving(early) as fake, gateway_over(fake.address) as web:
        for streams in (True, False):
            refused = await web.post("/api/pull", {"model": "o/m", "stream": streams})
            assert refused.status_code == status
            assert refused.json() == {"error": error.describe()}
            assert ("retry-after" in refused.headers) is (status in (429, 503))
    answers = Answers(pull=[listing, file, error])
    async with serving(answers) as fake, gateway_over(fake.address) as web:
        late = lines_in((await web.post("/api/pull", {"model": "o/m"})).text)
    assert late == [*LINES[:2], {"error": error.describe()}]


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("body", "words"),
    [({}, "model: "), ({"model": "o/m", "insecure": True}, "insecure: "), ({"nam": "x"}, "nam: ")],
)
async def test_a_field_is_refused_by_name(body: dict[str, Any], words: str) -> None:
    """Before a controller is asked."""
    async with serving(Answers()) as fake, gateway_over(fake.address) as web:
        status, answer = await web.error("/api/pull", body)
    assert (status, answer["error"][: len(words)]) == (400, words)
    assert fake.requests == []


@pytest.mark.asyncio
@pytest.mark.parametrize("streams", [True, False])
async def test_a_client_that_goes_ends_its_pull(streams: bool) -> None:
    """Streamed to, or waiting for the end: the controller is told at once."""
    answers = Answers(pull=pull_steps()[:2], hold=True)
    async with serving(answers) as fake, Clients(lambda: Client(fake.address)) as clients:
        body = json.dumps({"model": "o/m", "stream": streams}).encode()
        scope = {
            "type": "http", "method": "POST", "path": "/api/pull", "headers": [],
            "raw_path": b"/api/pull", "query_string": b"", "http_version": "1.1",
        }  # fmt: skip
        messages = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Any:
            if messages:
                return messages.pop()
            await fake.held.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            """Take it."""

        await make_app(clients, Door())(scope, receive, send)
        await fake.left.wait()


@pytest.mark.asyncio
@pytest.mark.parametrize("streams", [True, False])
async def test_a_pull_holds_no_gateway_up(streams: bool) -> None:
    """A gateway that leaves says so; the download may go on for others."""
    answers = Answers(pull=pull_steps()[:2], hold=True)
    leaving = asyncio.Event()
    body = json.dumps({"model": "o/m", "stream": streams}).encode()
    async with serving(answers) as fake, Clients(lambda: Client(fake.address)) as clients:
        server = make_server(make_app(clients, Door(), leaving=leaving), OPEN, leaving=leaving)
        with listen_on(parse_address("127.0.0.1:0"), anywhere=False) as listener:
            running = asyncio.create_task(server.serve(sockets=[listener]))
            url = f"http://127.0.0.1:{listener.getsockname()[1]}/api/pull"
            async with httpx2.AsyncClient(timeout=60) as http:
                posting = asyncio.create_task(http.post(url, content=body))
                await fake.held.wait()
                server.should_exit = True
                answer = await posting
            await running
    assert answer.status_code == (200 if streams else 503)
    assert lines_in(answer.text)[-1] == {"error": "the server is shutting down"}
