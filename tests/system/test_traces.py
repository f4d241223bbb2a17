"""One request's trace through gateway and controller, as a collector gets it."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from mlxd import Client, call_headers
from tests.fakes.collector import Sent, collecting
from tests.support.gateways import serve_web
from tests.support.served import Served

DEMO = Path(__file__).parents[2] / "shared" / "mlxd_shared" / "demo_model"
CALL = "mlxd.v1.InferenceService/Generate"
PHASES = ["load", "queue", "prompt", "tokens"]
TRACE, SPAN = "a" * 32, "b" * 16
SENT = {"traceparent": f"00-{TRACE}-{SPAN}-01"}
SOON = {"OTEL_BSP_SCHEDULE_DELAY": "50"}
BODY = {"model": "demo", "prompt": "Once upon", "max_tokens": 4, "stream": True}


def children(spans: list[Sent], parent: str) -> list[Sent]:
    """Return a span's children by when they began."""
    own = [span for span in spans if span.parent == parent and span.trace_id == TRACE]
    return sorted(own, key=lambda span: (span.begun_ns, span.ended_ns))


def check_call(spans: list[Sent], parent: str) -> None:
    """Assert that a Generate stands below `parent`, and its phases, in order, within it."""
    (call,) = (span for span in children(spans, parent) if span.name == CALL)
    assert call.service == "mlxd-controller"
    assert call.attributes["gen_ai.request.model"] == "demo"
    assert call.attributes["gen_ai.usage.output_tokens"] == 4
    phases = children(spans, call.id)
    assert [span.name for span in phases] == PHASES
    assert all(one.ended_ns <= two.begun_ns + 1_000 for one, two in pairwise(phases))
    assert phases[-1].ended_ns <= call.ended_ns


@pytest.mark.asyncio
async def test_a_request_is_one_tree() -> None:
    """From the client's span by HTTP and the call to load, queue, prompt and tokens; by gRPC too.

    The first request finds its model unloaded, so its load takes longer than nothing.
    """
    async with collecting() as collector:
        environment = SOON | {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.endpoint}
        async with serve_web("--model", f"demo={DEMO}", environment=environment) as web:
            assert isinstance(web.served, Served)
            answer = await web.post("/v1/completions", BODY, headers=SENT)
            assert answer.text.endswith("[DONE]\n\n")
            async with Client(web.served.address) as client:
                marked = call_headers.set(tuple(SENT.items()))
                await client.complete("Once upon", model="demo", max_tokens=4)
                call_headers.reset(marked)
            await collector.wait(lambda spans: sum(s.name == CALL for s in spans) == 2)
            await collector.wait(lambda spans: any(s.service == "mlxd-gateway" for s in spans))
        (request,) = (s for s in children(collector.spans, SPAN) if s.service == "mlxd-gateway")
        assert request.name == "POST /v1/completions"
        check_call(collector.spans, request.id)
        check_call(collector.spans, SPAN)
        load, *_ = children(collector.spans, children(collector.spans, request.id)[0].id)
        assert load.ended_ns > load.begun_ns
