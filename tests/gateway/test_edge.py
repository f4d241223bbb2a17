"""What every request passes: ids, traces, the token, origins, bounds, and errors in shape."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx2
import pytest

from mlxd import Client
from mlxd.v1 import inference_pb2
from mlxd_gateway.app import make_app
from mlxd_gateway.common.clients import Clients
from mlxd_gateway.door import Door
from mlxd_shared import config
from mlxd_shared.domain.errors import (
    InternalError,
    MlxdError,
    ModelDraining,
    ModelNotFound,
    NoChatTemplate,
    QueueFull,
)
from mlxd_shared.domain.errors import InvalidRequest as Invalid
from mlxd_shared.security.tokens import Token
from tests.fakes.mlxd_server import Answers, serving
from tests.support.gateways import Web, gateway_over
from tests.support.spoken import answer_with_text

Said = inference_pb2.GenerateResponse | MlxdError
SECRET = "a-token-of-sixteen-letters"
CHAT = {"model": "demo", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
CHATS = ("/v1/chat/completions", "/v1/responses", "/v1/messages", "/api/chat")
RERANKS = ("/v1/rerank", "/v2/rerank")
TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
WRONG = {"X-Request-Id": "a b", "traceparent": "x"}
ERRORS = [
    (ModelNotFound("demo"), 404, "model"),
    (NoChatTemplate("demo"), 400, "messages"),
    (Invalid.of("sampling.temperature", "is too hot"), 400, "temperature"),
    (Invalid.of("chat.messages[0].content", "is too long"), 400, "messages[0].content"),
    (QueueFull("streams", 4, retry_after_s=2.5), 429, None),
    (ModelDraining("demo", retry_after_s=1.0), 503, None),
    (InternalError("e-1"), 500, None),
]


def body_for(path: str) -> dict[str, Any]:
    """Return a chat, or documents to rank, as the API at `path` takes them."""
    if path == "/api/chat":
        return {"model": "demo", "messages": CHAT["messages"], "stream": False}
    if path == "/v1/responses":
        return {"model": "demo", "input": CHAT["messages"]}
    if path in RERANKS:
        return {"model": "demo", "query": "a", "documents": ["b"]}
    return dict(CHAT)


def message_of(path: str, error: Any) -> str:
    """Return the message of an error, after looking at the API's shape of it."""
    if path == "/api/chat":
        assert set(error) == {"error"}
        return str(error["error"])
    if path == "/v1/messages":
        assert (error["type"], set(error["error"])) == ("error", {"type", "message"})
    else:
        assert set(error["error"]) == {"message", "type", "param", "code"}
    return str(error["error"]["message"])


@pytest.mark.asyncio
@pytest.mark.parametrize("path", CHATS)
async def test_errors_have_the_apis_own_shape(path: str) -> None:
    """Each error of mlxd's has a status, a field in the request's words, and a time to retry."""
    for error, status, field in ERRORS:
        async with serving(Answers(generate=[error])) as fake, gateway_over(fake.address) as web:
            answer = await web.post(path, body_for(path))
            assert answer.status_code == status
            assert message_of(path, answer.json())
            assert ("retry-after" in answer.headers) == (status in (429, 503))
            if path == "/v1/chat/completions":
                assert answer.json()["error"]["param"] == field
            if path == "/v1/responses" and field is not None:
                assert answer.json()["error"]["param"] == field.replace("messages", "input")


@pytest.mark.asyncio
async def test_ids_and_traces() -> None:
    """A request's id is answered and passed on, made anew if it is none; so is the trace."""
    answers = Answers(generate=answer_with_text())
    async with serving(answers) as fake, gateway_over(fake.address) as web:
        headers = {"X-Request-Id": "mine-1", "traceparent": TRACE, "tracestate": "a=b"}
        named = await web.post(CHATS[0], CHAT, headers=headers)
        assert named.headers["x-request-id"] == "mine-1"
        assert fake.metadata[0]["traceparent"] == TRACE
        assert fake.metadata[0]["tracestate"] == "a=b"
        (request,) = fake.requests
        assert isinstance(request, inference_pb2.GenerateRequest)
        assert request.request_id.startswith("mine-1-")
        unnamed = await web.post(CHATS[0], CHAT, headers=WRONG)
        assert len(unnamed.headers["x-request-id"]) == 32
        assert "traceparent" not in fake.metadata[1]


@pytest.mark.asyncio
@pytest.mark.parametrize("path", [*CHATS, *RERANKS, "/v1/responses/a", "/v1/models", "/nothing"])
async def test_without_the_token_nothing_is_reached(path: str) -> None:
    """401 in the API's shape, for a path that there is not too; health alone is open."""
    async with (
        serving(Answers(generate=answer_with_text())) as fake,
        gateway_over(fake.address, token=Token(SECRET)) as web,
    ):
        refused = await web.post(path, body_for(path))
        assert (refused.status_code, refused.headers["www-authenticate"]) == (401, "Bearer")
        assert fake.requests == []
        for headers in ({"Authorization": f"Bearer {SECRET}"}, {"x-api-key": SECRET}):
            answer = await web.post(path, body_for(path), headers=headers)
            assert answer.status_code in (200, 404, 405)


@pytest.mark.asyncio
async def test_pages_of_named_origins_alone() -> None:
    """A browser is told yes for an origin that was named, and nothing for another."""
    async with (
        serving(Answers()) as fake,
        gateway_over(fake.address, origins=("https://chat.example",)) as web,
    ):
        for origin, allowed in (("https://chat.example", True), ("https://else.example", False)):
            asks = [("POST", path) for path in (*CHATS, *RERANKS)]
            for method, path in (*asks, ("DELETE", "/v1/responses/a")):
                headers = {"Origin": origin, "Access-Control-Request-Method": method}
                answer = await web.http.options(path, headers=headers)
                assert (answer.status_code == 200) is allowed
                assert (answer.headers.get("access-control-allow-origin") == origin) is allowed


@pytest.mark.asyncio
async def test_no_name_is_no_model() -> None:
    """The default model is for requests that name none, not for a question about one."""
    async with serving(Answers()) as fake, gateway_over(fake.address) as web:
        assert (await web.http.get("/v1/models/")).status_code == 404
        assert fake.requests == []


@pytest.mark.asyncio
async def test_a_page_reads_why_it_is_refused() -> None:
    """Refusals of the edge too are readable for a page that was named, and for no other."""
    async with (
        serving(Answers()) as fake,
        gateway_over(fake.address, token=Token(SECRET), origins=("https://chat.example",)) as web,
    ):
        for origin, allowed in (("https://chat.example", True), ("https://else.example", False)):
            answer = await web.post(CHATS[0], body_for(CHATS[0]), headers={"Origin": origin})
            assert answer.status_code == 401
            assert (answer.headers.get("access-control-allow-origin") == origin) is allowed


STRANGERS = [
    {"Origin": "https://else.example"},
    {"Origin": "null"},
    {"Origin": ""},
    {"Origin": "https://else.example", "Content-Type": "text/plain"},
    {"Host": "else.example"},
    {"Host": "else.example:8556", "Origin": "http://else.example:8556"},
    {"Host": ""},
]
FRIENDS = [
    {"Origin": "https://chat.example"},
    {"Origin": "vscode-webview://panel"},
    {"Host": "localhost:8556", "Origin": "http://localhost:8556"},
    {"Host": "models.localhost"},
    {"Host": "[::1]:8556"},
    {"Host": "chat.example"},
]


@pytest.mark.asyncio
@pytest.mark.parametrize("path", CHATS)
async def test_pages_of_strangers_are_kept_out(path: str) -> None:
    """Whoever a browser sends a request for is known by Origin and Host; a token says more."""
    answers = Answers(generate=answer_with_text())
    named = ("https://chat.example",)
    async with serving(answers) as fake, gateway_over(fake.address, origins=named) as web:
        for headers in STRANGERS:
            refused = await web.post(path, body_for(path), headers=headers)
            assert refused.status_code == 403, headers
            assert message_of(path, refused.json()).startswith(("Origin: ", "Host: "))
        assert fake.requests == []
        for headers in FRIENDS:
            answer = await web.post(path, body_for(path), headers=headers)
            assert answer.status_code == 200, headers
    async with serving(answers) as fake, gateway_over(fake.address, token=Token(SECRET)) as web:
        for headers in STRANGERS:
            own = {**headers, "Authorization": f"Bearer {SECRET}"}
            assert (await web.post(path, body_for(path), headers=own)).status_code == 200
    async with serving(answers) as fake, gateway_over(fake.address, local=False) as web:
        answer = await web.post(path, body_for(path), headers={"Host": "mlxd:8556"})
        assert answer.status_code == 200


@pytest.mark.asyncio
async def test_bounds_of_a_body() -> None:
    """One byte more than the bound is refused, whether its length was told before or not."""
    body = b'{"model": "' + b"x" * config.HTTP_BODY_BYTES_MAX + b'"}'

    async def pieces() -> Any:
        for start in range(0, len(body), config.MIB):
            yield body[start : start + config.MIB]

    async with serving(Answers()) as fake, gateway_over(fake.address) as web:
        with_length = await web.post(CHATS[0], body)
        without = await web.http.post(CHATS[0], content=pieces())
        assert (with_length.status_code, without.status_code) == (413, 413)
        for path in ("/v1/responses", *RERANKS):
            assert (await web.post(path, body)).status_code == 413
        assert fake.requests == []


@pytest.mark.asyncio
async def test_all_bodies_together_are_bounded() -> None:
    """What finds no room is told when to come again; what was read has left its room."""
    async with (
        serving(Answers(generate=answer_with_text())) as fake,
        Clients(lambda: Client(fake.address)) as clients,
    ):
        app = make_app(clients, Door(), bodies_nbytes_max=200)
        transport = httpx2.ASGITransport(app=app)
        async with httpx2.AsyncClient(transport=transport, base_url="http://x") as http:
            for length, status in ((180, 200), (201, 429), (180, 200)):
                body = json.dumps(CHAT).ljust(length)
                answer = await http.post(CHATS[0], content=body.encode())
                assert answer.status_code == status
                assert ("retry-after" in answer.headers) == (status == 429)


@pytest.mark.asyncio
async def test_paths_and_methods_that_there_are_not() -> None:
    """404 and 405 have the API's shape too."""
    async with serving(Answers()) as fake, gateway_over(fake.address, local=False) as web:
        for path in ("/v1/nothing", "/v1/messages/nothing", "/api/nothing"):
            answer = await web.http.get(path)
            assert answer.status_code == 404
            assert "error" in answer.json()
        strange = await web.http.get("/v1/nothing", headers={"Host": "["})
        assert strange.status_code == 404
        answer = await web.http.get("/api/chat")
        assert (answer.status_code, answer.headers["allow"]) == (405, "POST")


@pytest.mark.asyncio
async def test_an_error_in_the_middle_is_an_event_of_its_api() -> None:
    """The head is sent by then: the stream tells of it in its own way, and ends."""
    broken: list[Said] = [*answer_with_text()[:1], InternalError("e-2")]
    ends = {
        "/v1/chat/completions": 'data: {"error":',
        "/v1/responses": 'event: response.failed\ndata: {"type":"response.failed"',
        "/v1/messages": 'event: error\ndata: {"type":"error"',
        "/api/chat": '{"error":',
    }
    async with serving(Answers(generate=broken)) as fake, gateway_over(fake.address) as web:
        for path, end in ends.items():
            text = (await web.post(path, {**body_for(path), "stream": True})).text
            assert end in text
            assert "e-2" in text.rpartition(end)[2]


@pytest.mark.asyncio
async def test_health_follows_the_controller() -> None:
    """503 where no controller answers; a request then is 503 too, with a time to retry."""
    async with gateway_over("127.0.0.1:1") as web:
        assert (await web.http.get("/health")).status_code == 503
        answer = await web.http.get("/v1/models")
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")


async def leave_early(web: Web, path: str, body: dict[str, Any]) -> None:
    """Begin a request and go, before its answer or in the middle."""
    async with web.http.stream("POST", path, json=body) as answer:
        async for _ in answer.aiter_raw():
            return


@pytest.mark.asyncio
@pytest.mark.parametrize("path", CHATS)
async def test_a_client_that_goes_ends_its_stream(path: str) -> None:
    """The controller's call is cancelled as soon as the connection is closed."""
    answers = Answers(generate=answer_with_text()[:1], hold=True)
    async with serving(answers) as fake, gateway_over(fake.address) as web:
        await leave_early(web, path, {**body_for(path), "stream": True})
        await fake.left.wait()


@pytest.mark.asyncio
async def test_a_bug_is_in_the_log_and_its_id_in_the_answer(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The client learns the request's id and nothing of the cause; the next request is served."""

    def make() -> Client:
        raise ZeroDivisionError("the cause")

    async with serving(Answers(generate=answer_with_text())) as fake:
        clients = Clients(lambda: Client(fake.address))
        async with clients:
            app = make_app(Broken(clients, make), Door())
            transport = httpx2.ASGITransport(app=app, raise_app_exceptions=False)
            async with httpx2.AsyncClient(transport=transport, base_url="http://x") as http:
                for path in CHATS:
                    answer = await http.post(path, json=body_for(path))
                    request_id = answer.headers["x-request-id"]
                    assert answer.status_code == 500
                    message = message_of(path, answer.json())
                    assert message == f"internal error {request_id}"
                    assert request_id in capsys.readouterr().out
                assert (await http.get("/v1/models")).status_code == 200


class Broken(Clients):
    """Connections of which those for streams cannot be made."""

    def __init__(self, good: Clients, make: Callable[[], Client]) -> None:
        super().__init__(lambda: good.shared)
        self._make = make
