"""Calls that tests make to a real worker, and what to expect of them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from mlxd.v1 import inference_pb2, types_pb2
from mlxd_shared.domain.errors import MlxdError
from mlxd_shared.wire.status import RemoteError, from_call
from tests.support.worker_process import WorkerProcess

DEADLINE_EXCEEDED = grpc.StatusCode.DEADLINE_EXCEEDED
TRIES = 20


def greedy(**fields: Any) -> inference_pb2.GenerateRequest:
    """Return a greedy request that ends by length or context alone."""
    sampling = types_pb2.SamplingOptions(temperature=0)
    request = inference_pb2.GenerateRequest(sampling=sampling, ignore_eos=True, **fields)
    if request.WhichOneof("prompt") is None:
        request.text = "once"
    return request


async def ids(worker: WorkerProcess) -> list[int]:
    """Return the ids of a short greedy stream."""
    call = worker.inference.Generate(greedy(max_tokens=10))
    return [i async for message in call for i in message.token_ids]


async def error_of(call: Any) -> MlxdError:
    """Return the error that a call ends with, read to its end if it is a stream."""
    answer = _read(call) if isinstance(call, grpc.aio.UnaryStreamCall) else call
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await answer
    return from_call(caught.value)


async def _read(call: Any) -> list[Any]:
    return [message async for message in call]


async def said_in_time(ask: Callable[[], Awaitable[MlxdError]]) -> MlxdError:
    """Return what a server says just before a deadline, which `ask` has a call hear.

    Where the machine stands still at that moment it is gRPC that tells of the deadline: then `ask`
    is tried again.
    """
    for _ in range(TRIES):
        error = await ask()
        if not isinstance(error, RemoteError) or error.code is not DEADLINE_EXCEEDED:
            break
    return error


async def endless(worker: WorkerProcess) -> Any:
    """Return the call of a stream that has begun and will not end soon."""
    call = worker.inference.Generate(greedy())
    await anext(aiter(call))
    return call


async def health(channel: grpc.aio.Channel, name: str) -> int:
    """Return the health of one name behind a channel."""
    stub: Any = health_pb2_grpc.HealthStub(channel)
    answer = await stub.Check(health_pb2.HealthCheckRequest(service=name))
    return int(answer.status)
