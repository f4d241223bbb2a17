"""How a load generator speaks to a server of mlxd: one connection's worth of requests.

A client notes the time as soon as a message is there, and reads its contents afterwards.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from mlxd.v1 import inference_pb2, inference_pb2_grpc, types_pb2
from mlxd_controller.bench.requests import Request
from mlxd_shared.ops.measuring import Outcome
from mlxd_shared.security.secure_channel import PLAIN, ChannelSecurity, channel

OnFirst = Callable[[], None]
"""Called with the first token of a stream."""


class Client(Protocol):
    """One connection's worth of requests, one at a time or several."""

    async def ready(self) -> None:
        """Connect, where connections are kept."""

    async def ask(self, request: Request, on_first: OnFirst) -> Outcome:
        """Read one stream to its end; raise RuntimeError where its lengths are not those asked."""

    async def close(self) -> None:
        """Let go of the connection."""


class GrpcClient:
    """Our own protocol, on a connection of its own."""

    def __init__(self, target: str, model: str, security: ChannelSecurity = PLAIN) -> None:
        self._channel = channel(target, security)
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
            sampling=sampling,
            max_tokens=request.max_tokens,
            ignore_eos=True,
        )
        if request.ids:
            message.tokens.ids.extend(request.ids)
        else:
            message.text = request.text
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
        check_lengths(request, usage.prompt_tokens, sum(counts))
        return Outcome(sent_s, tuple(stamps_s), tuple(counts), "".join(parts))

    async def close(self) -> None:
        """Close the channel."""
        await self._channel.close()


def check_lengths(request: Request, prompt_tokens: int, completion_tokens: int) -> None:
    """Refuse a stream of other lengths than those that were asked for; raises RuntimeError."""
    counts, wanted = (prompt_tokens, completion_tokens), (request.prompt_tokens, request.max_tokens)
    if counts != wanted:
        message = f"{counts} prompt and new tokens instead of {wanted}"
        raise RuntimeError(message)
