"""The ways to the same tokens that are timed against each other."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from mlxd_controller.bench.clients import GrpcClient
from mlxd_controller.bench.requests import Request
from mlxd_shared.ops.measuring import Outcome, outcome_of


class Way(Protocol):
    """Something that turns a prompt into tokens, greedily."""

    async def run(self, prompt: Sequence[int], max_tokens: int) -> Outcome:
        """Time one stream of exactly `max_tokens` tokens."""
        ...

    async def close(self) -> None:
        """Let go of what it holds."""
        ...


class GrpcWay:
    """Any mlxd server: the controller, or a worker's own socket."""

    def __init__(self, target: str, model: str) -> None:
        self._client = GrpcClient(target, model)

    async def run(self, prompt: Sequence[int], max_tokens: int) -> Outcome:
        """Time one stream as its client sees it."""
        request = Request("", len(prompt), max_tokens, ids=tuple(prompt))
        return await self._client.ask(request, lambda: None)

    async def close(self) -> None:
        """Close the channel."""
        await self._client.close()


class PeerWay:
    """mlx-lm's stream_generate, in a process of its own (see `peer`)."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, folder: Path, *, blas: str, dtype: str) -> PeerWay:
        """Start the process and wait until its model is loaded."""
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "mlxd_worker.bench.peer", str(folder),
            "--blas", blas, "--dtype", dtype,
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL, limit=1 << 24,
        )  # fmt: skip
        way = cls(process)
        await way._answer()
        return way

    async def run(self, prompt: Sequence[int], max_tokens: int) -> Outcome:
        """Time one stream as the process itself sees it."""
        assert self._process.stdin is not None
        request = {"prompts": [list(prompt)], "max_tokens": max_tokens}
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        (values,) = json.loads(await self._answer())["outcomes"]
        return outcome_of(values)

    async def _answer(self) -> bytes:
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        if not line:
            message = f"mlx-lm ended with code {await self._process.wait()}"
            raise RuntimeError(message)
        return line

    async def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        await self._process.wait()
