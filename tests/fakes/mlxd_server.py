"""A server of the three public services over a real socket, with answers that a test scripts.

It checks nothing and keeps every request. tests/system/test_clients.py runs the same clients
against the real controller, which is what keeps this fake honest.
"""

# ruff: noqa: N802 - gRPC names its methods

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TypeVar

from google.protobuf.message import Message

from mlxd.v1 import (
    inference_pb2,
    inference_pb2_grpc,
    model_pb2,
    model_pb2_grpc,
    score_pb2,
    status_pb2,
    status_pb2_grpc,
    types_pb2,
)
from mlxd_shared.domain.errors import MlxdError
from mlxd_shared.ops.tracing import Tracer
from mlxd_shared.security.listeners import OPEN, ListenerSecurity
from mlxd_shared.security.net import parse_address
from mlxd_shared.serving.server import Health, listen, make_server
from mlxd_shared.wire.interceptors import Context

_T = TypeVar("_T")
Script = Sequence[_T | MlxdError]


@dataclass(slots=True)
class Answers:
    """What the fake says, message by message; an error in a script is raised there.

    `hold` keeps a stream open after its script, until the client goes away; `hold_load` a load.
    """

    generate: Script[inference_pb2.GenerateResponse] = ()
    generate_again: Sequence[Script[inference_pb2.GenerateResponse]] = ()
    """What the second call gets, and each further one; any beyond them what the first does."""
    load: Script[model_pb2.LoadModelResponse] = ()
    unload: model_pb2.UnloadModelResponse | MlxdError = field(
        default_factory=model_pb2.UnloadModelResponse
    )
    forget: model_pb2.ForgetModelResponse | MlxdError = field(
        default_factory=model_pb2.ForgetModelResponse
    )
    dropped: model_pb2.DropPrefixesResponse = field(default_factory=model_pb2.DropPrefixesResponse)
    verified: Script[model_pb2.VerifyPrefixesResponse] = ()
    logs: Script[model_pb2.ReadLogsResponse] = ()
    pull: Script[model_pb2.PullModelResponse] = ()
    models: Sequence[types_pb2.Model] = ()
    page_size: int = 2
    statuses: Script[status_pb2.Status] = ()
    token_ids: Sequence[int] = ()
    text: str = ""
    hold: bool = False
    hold_load: bool = False


class FakeServer(
    inference_pb2_grpc.InferenceServiceServicer,
    model_pb2_grpc.ModelServiceServicer,
    status_pb2_grpc.StatusServiceServicer,
):
    """The servicers. `requests` is what came; `held` and `left` tell of a held stream."""

    def __init__(self, answers: Answers) -> None:
        self.answers = answers
        self.requests: list[Message] = []
        self.metadata: list[dict[str, str | bytes]] = []
        """What each call of Generate came with."""
        self.held = asyncio.Event()
        self.left = asyncio.Event()
        self.address = ""

    async def _play(self, request: Message, script: Script[_T]) -> AsyncIterator[_T]:
        self.requests.append(request)
        try:
            for item in script:
                if isinstance(item, MlxdError):
                    raise item
                yield item
            if self.answers.hold:
                self.held.set()
                await asyncio.Event().wait()
        finally:  # a client may be gone before its last message is known to be sent
            self.left.set()

    async def Generate(
        self, request: inference_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        self.metadata.append(dict(context.invocation_metadata() or ()))
        later = self.answers.generate_again
        before = sum(isinstance(r, inference_pb2.GenerateRequest) for r in self.requests)
        script = later[before - 1] if 0 < before <= len(later) else self.answers.generate
        async for message in self._play(request, script):
            yield message

    async def Tokenize(
        self, request: inference_pb2.TokenizeRequest, context: Context
    ) -> inference_pb2.TokenizeResponse:
        self.requests.append(request)
        return inference_pb2.TokenizeResponse(token_ids=self.answers.token_ids)

    async def Detokenize(
        self, request: inference_pb2.DetokenizeRequest, context: Context
    ) -> inference_pb2.DetokenizeResponse:
        self.requests.append(request)
        return inference_pb2.DetokenizeResponse(text=self.answers.text)

    async def Embed(
        self, request: inference_pb2.EmbedRequest, context: Context
    ) -> inference_pb2.EmbedResponse:
        """Answer each text with its length and an eighth."""
        self.requests.append(request)
        vectors = [inference_pb2.Embedding(values=[len(text), 0.125]) for text in request.texts]
        return inference_pb2.EmbedResponse(embeddings=vectors)

    async def Score(
        self, request: score_pb2.ScoreRequest, context: Context
    ) -> score_pb2.ScoreResponse:
        """Answer each continuation with minus its length, as one token."""
        self.requests.append(request)
        lengths = [len(text) for each in request.texts for text in each.continuations]
        scores = [score_pb2.Score(logprob=-length, tokens=1) for length in lengths]
        return score_pb2.ScoreResponse(scores=scores)

    async def ListModels(
        self, request: model_pb2.ListModelsRequest, context: Context
    ) -> model_pb2.ListModelsResponse:
        self.requests.append(request)
        begin = int(request.page_token or 0)
        end = begin + self.answers.page_size
        more = end < len(self.answers.models)
        return model_pb2.ListModelsResponse(
            models=self.answers.models[begin:end], next_page_token=str(end) if more else ""
        )

    async def GetModel(
        self, request: model_pb2.GetModelRequest, context: Context
    ) -> model_pb2.GetModelResponse:
        """Answer with the first model; where none is scripted, with one that can chat."""
        self.requests.append(request)
        chatty = types_pb2.Model(name=request.model, has_chat_template=True)
        return model_pb2.GetModelResponse(model=next(iter(self.answers.models), chatty))

    async def LoadModel(
        self, request: model_pb2.LoadModelRequest, context: Context
    ) -> AsyncIterator[model_pb2.LoadModelResponse]:
        self.requests.append(request)
        for message in self.answers.load:
            if isinstance(message, MlxdError):
                raise message
            yield message
        if self.answers.hold_load:
            await asyncio.Event().wait()

    async def UnloadModel(
        self, request: model_pb2.UnloadModelRequest, context: Context
    ) -> model_pb2.UnloadModelResponse:
        self.requests.append(request)
        if isinstance(self.answers.unload, MlxdError):
            raise self.answers.unload
        return self.answers.unload

    async def ForgetModel(
        self, request: model_pb2.ForgetModelRequest, context: Context
    ) -> model_pb2.ForgetModelResponse:
        self.requests.append(request)
        if isinstance(self.answers.forget, MlxdError):
            raise self.answers.forget
        return self.answers.forget

    async def PullModel(
        self, request: model_pb2.PullModelRequest, context: Context
    ) -> AsyncIterator[model_pb2.PullModelResponse]:
        async for step in self._play(request, self.answers.pull):
            yield step

    async def DropPrefixes(
        self, request: model_pb2.DropPrefixesRequest, context: Context
    ) -> model_pb2.DropPrefixesResponse:
        self.requests.append(request)
        return self.answers.dropped

    async def VerifyPrefixes(
        self, request: model_pb2.VerifyPrefixesRequest, context: Context
    ) -> AsyncIterator[model_pb2.VerifyPrefixesResponse]:
        async for findings in self._play(request, self.answers.verified):
            yield findings

    async def WatchModels(
        self, request: model_pb2.WatchModelsRequest, context: Context
    ) -> AsyncIterator[model_pb2.WatchModelsResponse]:
        async for model in self._play(request, self.answers.models):
            yield model_pb2.WatchModelsResponse(model=model)

    async def ReadLogs(
        self, request: model_pb2.ReadLogsRequest, context: Context
    ) -> AsyncIterator[model_pb2.ReadLogsResponse]:
        async for message in self._play(request, self.answers.logs):
            yield message

    async def GetStatus(
        self, request: status_pb2.GetStatusRequest, context: Context
    ) -> status_pb2.GetStatusResponse:
        self.requests.append(request)
        first = self.answers.statuses[0]
        if isinstance(first, MlxdError):
            raise first
        return status_pb2.GetStatusResponse(status=first)

    async def WatchStatus(
        self, request: status_pb2.WatchStatusRequest, context: Context
    ) -> AsyncIterator[status_pb2.WatchStatusResponse]:
        async for status in self._play(request, self.answers.statuses):
            yield status_pb2.WatchStatusResponse(status=status)


@asynccontextmanager
async def serving(
    answers: Answers,
    *,
    calls_max: int | None = None,
    security: ListenerSecurity = OPEN,
    make: type[FakeServer] = FakeServer,
    tracer: Tracer | None = None,
) -> AsyncIterator[FakeServer]:
    """Serve on a port of the system's choice while the block lasts.

    calls_max: bounds calls and streams as a controller does; None: no bound. security: what calls
    must carry. make: another server of the same services. tracer: traces its calls.
    """
    fake = make(answers)
    server = make_server(Health(), (), calls_max=calls_max, security=security, tracer=tracer)
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(fake, server)
    model_pb2_grpc.add_ModelServiceServicer_to_server(fake, server)
    status_pb2_grpc.add_StatusServiceServicer_to_server(fake, server)
    fake.address = listen(server, parse_address("127.0.0.1:0"))
    await server.start()
    try:
        yield fake
    finally:
        await server.stop(None)
