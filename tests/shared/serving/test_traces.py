"""The span of each call of a traced server."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from mlxd import Client, InvalidRequest, call_headers
from mlxd.v1 import inference_pb2
from mlxd_shared.domain.errors import MlxdError
from mlxd_shared.wire.interceptors import Context
from tests.fakes.mlxd_server import Answers, FakeServer, serving
from tests.fakes.replies import DIGEST, last
from tests.support.traces import Kept, parent_of, trace_id_of

TRACE, SPAN = "a" * 32, "b" * 16
GENERATE, TOKENIZE = (f"mlxd.v1.InferenceService/{name}" for name in ("Generate", "Tokenize"))


class Refusing(FakeServer):
    """A server that turns down every text."""

    async def Tokenize(  # noqa: N802 - gRPC's name
        self, request: inference_pb2.TokenizeRequest, context: Context
    ) -> inference_pb2.TokenizeResponse:
        """Refuse the text."""
        raise InvalidRequest.of("text", "is wrong")


def first_and_last() -> list[inference_pb2.GenerateResponse]:
    """A stream of one token."""
    end = last(0, token_ids=(1,))
    end.request_id, end.model_digest = "r", DIGEST
    return [end]


@pytest.mark.asyncio
async def test_every_call_has_a_span_with_its_status() -> None:
    """A stream and a single answer, ended well, refused, and left; health has none."""
    kept = Kept()
    answers = Answers(generate=first_and_last(), token_ids=(1,))
    async with serving(answers, tracer=kept.tracer) as fake, Client(fake.address) as client:
        marked = call_headers.set((("traceparent", f"00-{TRACE}-{SPAN}-01"),))
        await client.complete("a")
        call_headers.reset(marked)
        await client.tokenize("a")
        await client.healthy()
        answers.hold, answers.generate = True, ()
        stream = client.generate("a")
        async with stream:
            await fake.held.wait()
    async with (
        serving(answers, tracer=kept.tracer, make=Refusing) as fake,
        Client(fake.address) as client,
    ):
        with pytest.raises(MlxdError):
            await client.tokenize("a")
    spans = [(span.name, (span.attributes or {})["rpc.grpc.status_code"]) for span in kept.spans]

    assert spans == [(GENERATE, 0), (TOKENIZE, 0), (GENERATE, 1), (TOKENIZE, 3)]
    assert [span.status.is_ok for span in kept.spans[2:]] == [False, False]
    assert (trace_id_of(kept.spans[0]), parent_of(kept.spans[0])) == (TRACE, SPAN)
    assert parent_of(kept.spans[1]) == ""


@pytest.mark.asyncio
async def test_a_method_that_there_is_not_has_no_span() -> None:
    """A client cannot fill a collector with names that it makes up."""
    kept = Kept()
    async with (
        serving(Answers(), tracer=kept.tracer) as fake,
        grpc.aio.insecure_channel(fake.address) as channel,
    ):
        made_up: Any = channel.unary_unary("/mlxd.v1.InferenceService/MadeUp")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await made_up(b"")
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert kept.spans == ()
