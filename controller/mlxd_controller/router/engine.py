"""One model as an engine of `vllm.grpc.engine`: a client of the controller's own services.

Invariants:
- It decides nothing: loading, queueing, placing, migration and every check are the services'.
- A stream survives its worker's death as every stream does; its client does not hear of it.
- A method that is not served says so by its name; so does every field, see `asking`.
"""
# ruff: noqa: ARG002, N802 - gRPC's names and signatures

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final, NoReturn, TypeAlias

import grpc
from google.protobuf.message import Message
from smg_grpc_proto import vllm_engine_pb2 as pb

from mlxd.v1 import inference_pb2, model_pb2, types_pb2
from mlxd_controller.router.about import chunks_of, digest_of, info_to_pb, zip_tokenizer
from mlxd_controller.router.answering import Answers
from mlxd_controller.router.asking import check_rank, generate_of
from mlxd_controller.router.calls import Calls
from mlxd_controller.router.loads import SECTIONS, Load, load_of, loads_to_pb, record_to_pb
from mlxd_controller.router.services import Services
from mlxd_shared import config
from mlxd_shared.domain.errors import FieldNotServed, InvalidRequest, MlxdError
from mlxd_shared.wire.admission import Room
from mlxd_shared.wire.intake import run_paced
from mlxd_shared.wire.interceptors import Context
from mlxd_shared.wire.status import RemoteError

DESCRIPTOR: Final = pb.DESCRIPTOR.services_by_name["VllmEngine"]
SERVER_TYPE: Final = "mlxd"
_Request: TypeAlias = Any  # a message whose package has no types


class Engine:
    """Implements the service for the model of one name."""

    def __init__(self, model: str, services: Services, *, tokenizers: Room) -> None:
        """Serve `model`; `tokenizers` are the places of those that are sent at once."""
        self.model = model
        self._services = services
        self._tokenizers = tokenizers
        self._calls = Calls()
        self._version = version("mlxd")
        self._started_s = services.clock.now_s()
        self._received_unix_s = 0.0

    async def Generate(self, request: _Request, context: Context) -> AsyncGenerator[Message, None]:
        """Stream a completion, or return it whole."""
        self._received_unix_s = self._services.clock.unix_s()
        ask = await run_paced(generate_of, request, model=self.model)
        answers = Answers(
            streams=request.stream, choices=ask.n or 1, prompt_ids=request.tokenized.input_ids
        )
        frames = self._services.inference.Generate(ask, context)
        async with aclosing(self._calls.read(request.request_id, frames)) as stream:
            async for frame in stream:
                for answer in answers.end_aborted() if frame is None else answers.of(frame):
                    yield answer

    async def Embed(self, request: _Request, context: Context) -> Message:
        """Return the vector of a text, whose ids must be those that the model makes of it."""
        self._received_unix_s = self._services.clock.unix_s()
        return await self._calls.ask(request.request_id, self._embed(request, context))

    async def Abort(self, request: _Request, context: Context) -> Message:
        """End requests by their ids; those that are not under way are passed over."""
        self._calls.abort(request.request_ids)
        made: Message = pb.AbortResponse()
        return made

    async def HealthCheck(self, request: Message, context: Context) -> Message:
        """Say whether the model can be asked for, loaded or not."""
        problem = ""
        try:
            await self._services.catalog.find(self.model)
        except MlxdError as error:
            problem = error.describe()
        made: Message = pb.HealthCheckResponse(healthy=not problem, message=problem or "ok")
        return made

    async def GetModelInfo(self, request: Message, context: Context) -> Message:
        """Return what the model is."""
        model = await self._view(context)
        return await asyncio.to_thread(info_to_pb, model, name=self.model)

    async def GetServerInfo(self, request: Message, context: Context) -> Message:
        """Return what serves it; how many rows it has is known once it is loaded."""
        model, now_s = await self._view(context), self._services.clock.now_s()
        made: Message = pb.GetServerInfoResponse(
            active_requests=self._calls.active,
            last_receive_timestamp=self._received_unix_s,
            uptime_seconds=now_s - self._started_s,
            server_type=SERVER_TYPE,
            data_parallel_size=1,
            max_num_seqs=model.rows_max,
            constrained_decoding_start="first_token",
        )
        return made

    async def GetLoads(self, request: _Request, context: Context) -> Message:
        """Return how busy it is: the core figures, which are all there are."""
        check_rank(request, "dp_rank")
        if request.include and not SECTIONS.intersection(request.include):
            made: Message = pb.GetLoadsResponse(version=self._version, dp_rank_count=1)
            return made
        unix_s = self._services.clock.unix_s()
        return loads_to_pb(await self._load(), unix_s=unix_s, version=self._version)

    async def GetTokenizer(
        self, request: Message, context: Context
    ) -> AsyncGenerator[Message, None]:
        """Send the tokenizer's files as a zip archive, in parts; few at once, as each is large."""
        model = await self._view(context)
        self._tokenizers.enter()
        try:
            archive = await asyncio.to_thread(zip_tokenizer, Path(model.path))
            digest = await asyncio.to_thread(digest_of, archive)
            for chunk in chunks_of(archive, digest):
                yield chunk
        finally:
            self._tokenizers.leave()

    async def SubscribeKvEvents(
        self, request: _Request, context: Context
    ) -> AsyncGenerator[Message, None]:
        """Push the load, each ROUTER_RECORD_S, to whoever takes it before any event.

        No event ever comes: what a worker keeps of prompts, and drops, it does not tell.
        """
        if not request.load_records_before_first_batch:
            raise FieldNotServed("SubscribeKvEvents without load_records_before_first_batch")
        if request.start_sequence_number:
            code = grpc.StatusCode.OUT_OF_RANGE
            raise RemoteError(code, "start_sequence_number: no events were sent to go on from")
        sample = 0
        while True:
            load, unix_s = await self._load(), self._services.clock.unix_s()
            yield record_to_pb(load, sample=sample, unix_s=unix_s)
            sample += 1
            await asyncio.sleep(config.ROUTER_RECORD_S)

    async def FlushCache(self, request: Message, context: Context) -> NoReturn:
        """Refuse: what is kept of prompts goes when memory is needed."""
        raise FieldNotServed("FlushCache")

    async def StartProfile(self, request: Message, context: Context) -> NoReturn:
        """Refuse: there is no profiler."""
        raise FieldNotServed("StartProfile")

    async def StopProfile(self, request: Message, context: Context) -> NoReturn:
        """Refuse: there is no profiler."""
        raise FieldNotServed("StopProfile")

    async def _view(self, context: Context) -> types_pb2.Model:
        ask = model_pb2.GetModelRequest(model=self.model)
        return (await self._services.models.GetModel(ask, context)).model

    async def _load(self) -> Load:
        ref = await self._services.catalog.find(self.model)
        workers = self._services.runtime.workers
        own = [worker for worker in workers.live() if worker.digest == ref.digest]
        await workers.refresh(own, wait_s=config.STATUS_WAIT_S, recent_s=config.STATUS_RECENT_S)
        now_s = self._services.clock.now_s()
        figures = [each.figures for each in own if each.figures is not None]
        age_s = max((each.figures_age_s(now_s) for each in own), default=0.0)
        return load_of(figures, calls=self._calls.active, age_s=age_s)

    async def _embed(self, request: _Request, context: Context) -> Message:
        """Embed what the ids spell.

        Workers take texts. So the text is given, if the model's own tokenizer makes these very ids
        of it; any other ids are refused.
        """
        inference, ids = self._services.inference, request.tokenized.input_ids
        text = request.tokenized.original_text
        if not ids:
            raise InvalidRequest.of("tokenized.input_ids", "is empty; at least one id is needed")
        if not text:
            spelling = inference_pb2.DetokenizeRequest(model=self.model, token_ids=ids)
            spelt = await inference.Detokenize(spelling, context)
            text = inference_pb2.DetokenizeResponse.FromString(spelt).text
        reading = inference_pb2.TokenizeRequest(model=self.model, text=text)
        read = await inference.Tokenize(reading, context)
        if inference_pb2.TokenizeResponse.FromString(read).token_ids != ids:
            problem = "these are not the ids that the model's own tokenizer makes of the text"
            raise InvalidRequest.of("tokenized.input_ids", problem)
        embedding = inference_pb2.EmbedRequest(model=self.model, texts=[text])
        answer = await inference.Embed(embedding, context)
        done = inference_pb2.EmbedResponse.FromString(answer)
        vector = done.embeddings[0].values
        made: Message = pb.EmbedResponse(
            embedding=vector, prompt_tokens=done.prompt_tokens, embedding_dim=len(vector)
        )
        return made
