"""The two kinds of client that the load generator has: gRPC, and server-sent events over HTTP.

Both note the time as soon as a message is there, and read its contents afterwards.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from typing import Any, Protocol

import grpc

from mlxd.v1 import inference_pb2, inference_pb2_grpc, types_pb2
from mlxd_shared.security.net import CHANNEL_OPTIONS
from tests.bench.requests import Outcome, Request

OnFirst = Callable[[], None]
"""Called with the first token of a stream."""
_DATA = b"data: "
_DONE = b"[DONE]"


class Client(Protocol):
    """One connection's worth of requests, one at a time or several."""

    async def ready(self) -> None:
        """Connect, where connections are kept."""
        ...

    async def ask(self, request: Request, on_first: OnFirst) -> Outcome:
        """Read one stream to its end; raise RuntimeError where its lengths are not those asked."""
        ...

    async def close(self) -> None:
        """Let go of the connection."""
        ...


class GrpcClient:
    """Our own protocol, on a connection of its own."""

    def __init__(self, target: str, model: str) -> None:
        # Channels to one target share a connection unless told not to.
        options = [*CHANNEL_OPTIONS, ("grpc.use_local_subchannel_pool", 1)]
        self._channel = grpc.aio.insecure_channel(target, options=options)
        self._stub: inference_pb2_grpc.InferenceServiceAsyncStub = (
            inference_pb2_grpc.InferenceServiceStub(self._channel)
        )
        self._model = model

    async def ready(self) -> None:
        """Connect."""
        await self._channel.channel_ready()

    async def ask(self, request: Request, on_first: OnFirst) -> Outcome:
        """Read one stream to its end."""
        sampling = types_pb2.SamplingOptions(
            temperature=request.temperature, top_p=1.0, top_k=0, seed=request.seed
        )
        message = inference_pb2.GenerateRequest(
            model=self._model,
            text=request.text,
            sampling=sampling,
            max_tokens=request.max_tokens,
            ignore_eos=True,
        )
        stamps_s: list[float] = []
        counts: list[int] = []
        parts: list[str] = []
        usage = types_pb2.Usage()
        sent_s = time.perf_counter()
        async for part in self._stub.Generate(message):
            now_s = time.perf_counter()
            parts.append(part.text)
            if part.token_ids:
                stamps_s.append(now_s)
                counts.append(len(part.token_ids))
                if len(stamps_s) == 1:
                    on_first()
            if part.HasField("usage"):
                usage = part.usage
        _check(request, usage.prompt_tokens, sum(counts))
        return Outcome(sent_s, tuple(stamps_s), tuple(counts), "".join(parts))

    async def close(self) -> None:
        """Close the channel."""
        await self._channel.close()


class HttpClient:
    """mlx-lm's server: HTTP, a connection a request, since it keeps none open."""

    def __init__(self, target: str, model: str) -> None:
        self._host, _, port = target.rpartition(":")
        self._port = int(port)
        self._model = model

    async def ready(self) -> None:
        """Do nothing: connections are not kept."""

    async def ask(self, request: Request, on_first: OnFirst) -> Outcome:
        """Read one stream to its end.

        A message does not say how many tokens it brings: one, and those before it whose text was
        still incomplete. The latter, which the usage tells in the end, are counted with the first
        message after the first one; the gaps between tokens are the same wherever they are counted.
        """
        sent_s = time.perf_counter()
        reader, writer = await asyncio.open_connection(self._host, self._port)
        try:
            writer.write(self._request(request))
            await _skip_head(reader)
            stamps_s: list[float] = []
            parts: list[str] = []
            usage: dict[str, int] = {}
            while line := await reader.readline():
                now_s = time.perf_counter()
                if not line.startswith(_DATA) or line.startswith(_DATA + _DONE):
                    continue
                event: dict[str, Any] = json.loads(line[len(_DATA) :])
                usage = event.get("usage", usage)
                text = "".join(choice["text"] for choice in event["choices"])
                if text:
                    parts.append(text)
                    stamps_s.append(now_s)
                    if len(stamps_s) == 1:
                        on_first()
        finally:
            writer.close()
        _check(request, usage["prompt_tokens"], usage["completion_tokens"])
        counts = [1] * len(stamps_s)
        counts[min(1, len(counts) - 1)] += request.max_tokens - len(counts)
        return Outcome(sent_s, tuple(stamps_s), tuple(counts), "".join(parts))

    def _request(self, request: Request) -> bytes:
        fields: dict[str, object] = {
            "model": self._model,
            "prompt": request.text,
            "max_tokens": request.max_tokens,
            "temperature": request.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if request.seed is not None:
            fields["seed"] = request.seed
        body = json.dumps(fields).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {self._host}\r\nConnection: close\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body

    async def close(self) -> None:
        """Do nothing: connections are not kept."""


async def _skip_head(reader: asyncio.StreamReader) -> None:
    head = await reader.readuntil(b"\r\n\r\n")
    if b" 200 " not in head.split(b"\r\n", 1)[0]:
        message = f"{head!r} {await reader.read()!r}"
        raise RuntimeError(message)


def _check(request: Request, prompt_tokens: int, completion_tokens: int) -> None:
    counts, wanted = (prompt_tokens, completion_tokens), (request.prompt_tokens, request.max_tokens)
    if counts != wanted:
        message = f"{counts} prompt and new tokens instead of {wanted}"
        raise RuntimeError(message)
