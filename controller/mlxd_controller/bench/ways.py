"""The ways to the same tokens: an engine alone, a server with its clients, and mlx-lm.

Invariants:
- Each computes in a process of its own, one way after the other, so that the largest model is in
  memory once; clients are in another process than what serves them.
- What was started is gone when its block is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from mlxd import Client
from mlxd_controller.bench.cells import SETTLING_TOKENS, Plan, Prompts, Ran
from mlxd_controller.bench.requests import GRPC, Job, Request, job_to_json
from mlxd_controller.demo import serving
from mlxd_controller.launcher.environment import own_environment
from mlxd_shared.domain.requests import LoadSpec, Weights
from mlxd_shared.ops.measuring import outcome_of, outcomes_from_json
from mlxd_shared.security.secure_channel import PLAIN, ChannelSecurity

ENGINE, SERVED, PEER = "engine", "served", "mlx-lm"
LINE_BYTES_MAX = 1 << 26
_ENGINE = (sys.executable, "-m", "mlxd_worker.bench")
_PEER = (sys.executable, "-m", "mlxd_worker.bench.peer")
_LOAD = (sys.executable, "-m", "mlxd_controller.bench.load")
_LAST_WORDS_CHARS = 300


class WayFailed(Exception):
    """A process that failed at its task; the text gives the reason."""


class Way(Protocol):
    """Something that turns prompts into tokens, side by side and greedily."""

    async def run(self, prompts: Prompts, new_tokens: int) -> Ran:
        """Time streams of exactly `new_tokens` tokens, after a short one that is not timed."""


@dataclass(frozen=True, slots=True)
class LinesWay:
    """A process that answers a line with a line. `facts`: its report when it was ready."""

    process: asyncio.subprocess.Process
    facts: dict[str, Any] = field(default_factory=dict)

    async def run(self, prompts: Prompts, new_tokens: int) -> Ran:
        """Time streams as the process itself sees them."""
        await self._ask([prompts[0][::-1]], SETTLING_TOKENS)
        answer = await self._ask(prompts, new_tokens)
        return Ran(tuple(map(outcome_of, answer["outcomes"])), answer["peak_nbytes"])

    async def _ask(self, prompts: Prompts, new_tokens: int) -> dict[str, Any]:
        assert self.process.stdin is not None
        request = {"prompts": prompts, "max_tokens": new_tokens}
        self.process.stdin.write(json.dumps(request).encode() + b"\n")
        return await read_answer(self.process)


@dataclass(frozen=True, slots=True)
class ServedWay:
    """A server that has the model loaded; its clients are a process of their own, once a run."""

    client: Client
    address: str
    model: str
    security: ChannelSecurity = PLAIN

    async def run(self, prompts: Prompts, new_tokens: int) -> Ran:
        """Time streams as their clients see them; memory is what the worker's process has used."""
        settling = Request("", len(prompts[0]), SETTLING_TOKENS, ids=tuple(prompts[0][::-1]))
        requests = [Request("", len(ids), new_tokens, ids=tuple(ids)) for ids in prompts]
        job = Job(
            GRPC,
            self.address,
            self.model,
            (settling,),
            tuple(requests),
            len(prompts),
            self.security,
        )
        outcomes = outcomes_from_json(await _run_once(_LOAD, job_to_json(job)))
        workers = (await self.client.status(self.model)).workers
        peak_nbytes = max((worker.memory.mlx_peak_nbytes for worker in workers), default=0)
        return Ran(tuple(outcomes), peak_nbytes)


def engine_alone(path: Path, plan: Plan, weights: Weights) -> AbstractAsyncContextManager[LinesWay]:
    """Run an engine on the model while the block lasts.

    Raises:
        WayFailed: the model cannot be loaded; says why.
    """
    sizes = ("--rows", str(plan.rows), "--context", str(plan.context), "--weights", weights.value)
    return _lines((*_ENGINE, str(path), *sizes))


def peer_alone(path: Path, *, dtype: str) -> AbstractAsyncContextManager[LinesWay]:
    """Run mlx-lm on the model, over the same BLAS, while the block lasts; dtype: float32 or stored.

    Raises:
        WayFailed: it cannot load it; says why.
    """
    return _lines((*_PEER, str(path), "--blas", "ours", "--dtype", dtype))


@asynccontextmanager
async def temporary_server(path: Path, plan: Plan, weights: Weights) -> AsyncIterator[ServedWay]:
    """Serve the model by a controller and a worker of its own while the block lasts.

    Raises:
        NotServed: it does not start, or ends with an error.
    """
    # A socket's path is short: macOS's own temporary folders are too deep.
    with tempfile.TemporaryDirectory(prefix="mlxd-", dir="/tmp") as folder:
        at = f"unix:{folder}/s"
        named = ("--model", f"bench={path}")
        async with serving(at, Path(folder) / "log", named) as address, Client(address) as client:
            await load_for(client, "bench", plan, weights)
            yield ServedWay(client, address, "bench")


async def load_for(client: Client, model: str, plan: Plan, weights: Weights) -> str:
    """Load a model with the rows and the context that are measured; return its name there.

    Raises:
        MlxdError: as the server's.
    """
    spec = LoadSpec(context_length=plan.context, rows_max=plan.rows, weights=weights)
    async with client.load(model, options=spec) as updates:
        names = [update.model.name async for update in updates]
    return names[-1]


async def read_answer(process: asyncio.subprocess.Process) -> dict[str, Any]:
    """Return a process's next line.

    Raises:
        WayFailed: it says why there is none, or has ended without one.
    """
    assert process.stdout is not None
    line = await process.stdout.readline()
    answer: dict[str, Any] = json.loads(line) if line else {}
    if line and "error" not in answer:
        return answer
    assert process.stderr is not None
    words = answer.get("error") or (await process.stderr.read()).decode(errors="replace")
    last = (words.strip().splitlines() or [f"exit code {await process.wait()}"])[-1]
    raise WayFailed(last[:_LAST_WORDS_CHARS])


@asynccontextmanager
async def _lines(command: Sequence[str]) -> AsyncIterator[LinesWay]:
    async with _process(command) as process:
        yield LinesWay(process, await read_answer(process))


@asynccontextmanager
async def _process(command: Sequence[str]) -> AsyncIterator[asyncio.subprocess.Process]:
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *command, stdin=pipe, stdout=pipe, stderr=pipe, limit=LINE_BYTES_MAX,
        env=own_environment(),
    )  # fmt: skip
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def _run_once(command: Sequence[str], text: bytes) -> bytes:
    """Run a process on one input; return its output.

    Raises:
        WayFailed: it failed.
    """
    async with _process(command) as process:
        out, err = await process.communicate(text)
        if process.returncode:
            last = (err.decode(errors="replace").strip().splitlines() or ["no word"])[-1]
            raise WayFailed(f"the load generator failed: {last[:_LAST_WORDS_CHARS]}")
        return out
