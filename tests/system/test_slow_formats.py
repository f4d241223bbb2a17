"""A format whose masks take more than they may, from a client to a real worker and back."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from mlxd import Client
from mlxd.v1 import inference_pb2, inference_pb2_grpc, types_pb2
from mlxd_controller.services.quarantine import DEATHS_MAX
from mlxd_shared.domain.errors import InvalidRequest
from tests.support.calls import error_of
from tests.support.held_masks import SLOW_BEHIND
from tests.support.served import serve

LIMIT_S = 240.0
PROMPT = "Once upon a time"
SLOW = inference_pb2.GenerateRequest(
    text=PROMPT,
    sampling=types_pb2.SamplingOptions(temperature=1.0, seed=5),
    max_tokens=400,
    min_tokens=400,
    response_format=inference_pb2.ResponseFormat(ebnf_grammar=SLOW_BEHIND),
)


@pytest.mark.asyncio
async def test_a_stream_that_its_masks_end_costs_no_worker() -> None:
    """More often than a prompt may kill workers: each time its field, in the middle of the stream.

    The worker is the same afterwards, none was tried in its place, and it answers the same prompt.
    """
    async with (
        asyncio.timeout(LIMIT_S),
        serve() as server,
        grpc.aio.insecure_channel(server.address) as channel,
        Client(server.address) as client,
    ):
        inference = inference_pb2_grpc.InferenceServiceStub(channel)
        for _ in range(DEATHS_MAX + 1):
            error = await error_of(inference.Generate(SLOW))

            assert isinstance(error, InvalidRequest), error
            (violation,) = error.violations
            assert violation.field == "response_format.ebnf_grammar"
            assert "max is 500" in violation.description
        assert len((await client.complete(PROMPT, max_tokens=3)).token_ids) == 3
        assert server.count("worker launched") == 1
        assert server.count("sent to another worker") == 0
