"""The ways to the same tokens that are timed against each other."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import grpc

from mlxd.v1 import inference_pb2, inference_pb2_grpc, types_pb2
from mlxd_shared.security.net import CHANNEL_OPTIONS


@dataclass(frozen=True, slots=True)
class Timing:
    """One stream: seconds to the first token, from it to the last, and the tokens."""

    prefill_s: float
    decode_s: float
    ids: tuple[int, ...]
    messages: int


class Way(Protocol):
    """Something that turns a prompt into tokens, greedily."""

    async def run(self, prompt: Sequence[int], max_tokens: int) -> Timing:
        """Time one stream of exactly `max_tokens` tokens."""
        ...

    async def close(self) -> None:
        """Let go of what it holds."""
        ...


class GrpcWay:
    """Any mlxd server: the controller, or a worker's own socket."""

    def __init__(self, target: str, model: str) -> None:
        self._channel = grpc.aio.insecure_channel(target, options=list(CHANNEL_OPTIONS))
        self._stub: inference_pb2_grpc.InferenceServiceAsyncStub = (
            inference_pb2_grpc.InferenceServiceStub(self._channel)
        )
        self._model = model

    async def run(self, prompt: Sequence[int], max_tokens: int) -> Timing:
        """Time one stream as its client sees it."""
        request = inference_pb2.GenerateRequest(
            model=self._model,
            tokens=inference_pb2.TokenIds(ids=prompt),
            sampling=types_pb2.SamplingOptions(temperature=0),
            max_tokens=max_tokens,
            ignore_eos=True,
        )
        ids: list[int] = []
        stamps = [time.perf_counter()]
        async for message in self._stub.Generate(request):
            if message.token_ids:
                ids += message.token_ids
                stamps.append(time.perf_counter())
        return Timing(stamps[1] - stamps[0], stamps[-1] - stamps[1], tuple(ids), len(stamps) - 1)

    async def close(self) -> None:
        """Close the channel."""
        await self._channel.close()


class PeerWay:
    """mlx-lm's stream_generate, in a process of its own (see `peer`)."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, folder: Path, *, blas: str, dtype: str) -> PeerWay:
        """Start the process and wait until its model is loaded."""
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tests.bench.peer", str(folder), "--blas", blas, "--dtype", dtype,
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL, limit=1 << 24,
        )  # fmt: skip
        way = cls(process)
        await way._answer()
        return way

    async def run(self, prompt: Sequence[int], max_tokens: int) -> Timing:
        """Time one stream as the process itself sees it."""
        assert self._process.stdin is not None
        request = {"prompt": list(prompt), "max_tokens": max_tokens}
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        answer = await self._answer()
        ids = tuple(answer["ids"])
        return Timing(answer["prefill_s"], answer["decode_s"], ids, len(ids))

    async def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        if not line:
            message = f"mlx-lm ended with code {await self._process.wait()}"
            raise RuntimeError(message)
        answer: dict[str, Any] = json.loads(line)
        return answer

    async def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        await self._process.wait()
