"""A probe: sends some fields for real and asserts that each of them matters."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import grpc
from google.protobuf.message import Message

from mlxd.v1 import (
    inference_pb2,
    inference_pb2_grpc,
    model_pb2_grpc,
    status_pb2_grpc,
    types_pb2,
    worker_pb2_grpc,
)
from mlxd_shared.domain.errors import MlxdError
from mlxd_shared.wire.status import from_call
from tests.support.cli import LIMIT_S
from tests.system.wire.walk import Recorder

R = TypeVar("R", bound=Message)
GREEDY = types_pb2.SamplingOptions(temperature=0)
LONG = "long"
"""A model whose streams go on for as long as a check needs them to."""


@dataclass(slots=True)
class Wire:
    """One server's stubs, the model to ask for, and the recorder that sees every response."""

    channel: grpc.aio.Channel
    recorder: Recorder
    model: str
    folder: Path
    inference: inference_pb2_grpc.InferenceServiceAsyncStub = field(init=False)
    models: model_pb2_grpc.ModelServiceAsyncStub = field(init=False)
    status: status_pb2_grpc.StatusServiceAsyncStub = field(init=False)
    worker: worker_pb2_grpc.WorkerServiceAsyncStub = field(init=False)

    def __post_init__(self) -> None:
        self.inference = inference_pb2_grpc.InferenceServiceStub(self.channel)
        self.models = model_pb2_grpc.ModelServiceStub(self.channel)
        self.status = status_pb2_grpc.StatusServiceStub(self.channel)
        self.worker = worker_pb2_grpc.WorkerServiceStub(self.channel)

    async def generate(
        self, request: inference_pb2.GenerateRequest | None = None, **fields: Any
    ) -> list[inference_pb2.GenerateResponse]:
        """Return every message of one stream: greedy, 12 tokens, from one text, unless told."""
        if request is None:
            request = inference_pb2.GenerateRequest(**fields)
        if request.WhichOneof("prompt") is None:
            request.text = "Once upon a time"
        if not request.model:
            request.model = self.model
        if not request.HasField("sampling"):
            request.sampling.CopyFrom(GREEDY)
        if not request.HasField("max_tokens") and not request.HasField("num_predict"):
            request.max_tokens = 12
        return [self.recorder.see(m) async for m in self.inference.Generate(request)]

    async def ids(self, **fields: Any) -> list[int]:
        """Return the token ids of one stream."""
        return [i for message in await self.generate(**fields) for i in message.token_ids]

    async def sample_ids(self, seed: int = 7, **sampling: Any) -> list[int]:
        """Return the token ids of one stream under these sampling options."""
        options = types_pb2.SamplingOptions(seed=seed, **sampling)
        return await self.ids(sampling=options)

    async def text(self, **fields: Any) -> str:
        """Return the text of one stream."""
        return "".join(message.text for message in await self.generate(**fields))


async def refusal(call: Awaitable[object]) -> MlxdError:
    """Return the error that `call` ends with; fail if it succeeds."""
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return from_call(error)
    raise AssertionError("the call succeeded")


async def read(call: grpc.aio.UnaryStreamCall[Any, R]) -> R:
    """Return the next message of a stream; fail at its end."""
    async for message in call:
        return message
    raise AssertionError("the stream has ended")


async def begins(call: grpc.aio.UnaryStreamCall[Any, R]) -> None:
    """Wait for the first message of a stream, which has had a row by then."""
    async with asyncio.timeout(LIMIT_S):
        await read(call)


Check = Callable[[Wire], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Probe:
    """A check and the request fields that it exercises (full names without `mlxd.v1.`)."""

    covers: tuple[str, ...]
    check: Check


@dataclass(slots=True)
class Probes:
    """A file's probes, in the order in which they run."""

    all: list[Probe] = field(default_factory=list)

    def covering(self, *names: str) -> Callable[[Check], Check]:
        """Register a check under the fields that it exercises."""

        def register(check: Check) -> Check:
            self.all.append(Probe(tuple(f"mlxd.v1.{name}" for name in names), check))
            return check

        return register
