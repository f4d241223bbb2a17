"""The span of a request over HTTP, and what the controller learns of it."""

from __future__ import annotations

import pytest

from mlxd_shared.domain.errors import InternalError
from mlxd_shared.security.tokens import Token
from tests.fakes.mlxd_server import Answers, serving
from tests.support.gateways import gateway_over
from tests.support.spoken import answer_with_text
from tests.support.traces import Kept, id_of, parent_of, trace_id_of

TRACE, SPAN = "a" * 32, "b" * 16
SENT = {"traceparent": f"00-{TRACE}-{SPAN}-01", "X-Request-Id": "mine-1"}
PATH = "/v1/chat/completions"
CHAT = {"model": "demo", "messages": [{"role": "user", "content": "Hi"}]}


@pytest.mark.asyncio
@pytest.mark.parametrize("streams", [True, False])
async def test_a_request_is_the_parent_of_its_calls(streams: bool) -> None:
    """Its span is the client's child, and ends with the answer; the call names it as its own."""
    kept = Kept()
    answers = Answers(generate=answer_with_text())
    async with serving(answers) as fake, gateway_over(fake.address, tracer=kept.tracer) as web:
        answer = await web.post(PATH, CHAT | {"stream": streams}, headers=SENT)
        assert answer.status_code == 200
    (span,) = kept.spans
    assert (trace_id_of(span), parent_of(span)) == (TRACE, SPAN)
    assert fake.metadata[0]["traceparent"] == f"00-{TRACE}-{id_of(span)}-01"
    assert (span.name, dict(span.attributes or {})) == (
        f"POST {PATH}",
        {
            "http.request.method": "POST", "url.path": PATH, "http.response.status_code": 200,
            "mlxd.request_id": "mine-1",
        },
    )  # fmt: skip


@pytest.mark.asyncio
async def test_what_fails_is_marked_and_what_clients_make_up_names_no_span() -> None:
    """A bug is an error of the span's, a wrong path is not; neither path nor model is in a name."""
    kept = Kept()
    answers = Answers(generate=[InternalError("e1")])
    async with serving(answers) as fake, gateway_over(fake.address, tracer=kept.tracer) as web:
        await web.post(PATH, CHAT)
        await web.post("/made/up", {})
        await web.http.get("/v1/models/demo")
    assert [(span.name, span.status.is_ok) for span in kept.spans] == [
        (f"POST {PATH}", False), ("POST", True), ("GET", True),
    ]  # fmt: skip


@pytest.mark.asyncio
@pytest.mark.parametrize("path", [PATH, "/made/up"])
async def test_a_method_that_a_client_makes_up_is_in_no_span(path: str) -> None:
    """It may be as long as a head: neither a span's name nor an attribute holds it."""
    kept = Kept()
    async with serving(Answers()) as fake, gateway_over(fake.address, tracer=kept.tracer) as web:
        await web.http.request("MADE-UP", path)
    (span,) = kept.spans
    assert "MADE-UP" not in span.to_json()
    assert dict(span.attributes or {})["http.request.method"] == "_OTHER"


@pytest.mark.asyncio
async def test_strangers_leave_no_spans() -> None:
    """What the door refuses is not traced: nobody can fill a collector without a token."""
    kept = Kept()
    async with (
        serving(Answers()) as fake,
        gateway_over(fake.address, token=Token("a" * 32), tracer=kept.tracer) as web,
    ):
        assert (await web.post(PATH, CHAT)).status_code == 401
    assert kept.spans == ()
