"""Mixed requests against one worker through a controller, and what must hold whenever it is idle.

Invariants:
- Everything that is random comes from one seed: prompts, lengths, and when clients leave.
- Rounds end idle; there the account is compared with MLX's own figure, and memory is sampled.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from mlxd import Client, Delta, LoadSpec, SamplingOptions
from mlxd.v1 import status_pb2, types_pb2
from tests.support.served import serve
from tests.support.tiny_model import VOCAB
from tests.support.worker_process import WorkerProcess, running_worker

NAME = "tiny"
CONTEXT = 512
ROWS_MAX = 6
PREFIX_BYTES = 1 << 20
"""Little, so that prefixes are evicted all the time."""
STEMS = 24
STEM_TOKENS_MAX = 300
TAIL_TOKENS_MAX = 40
NEW_TOKENS_MAX = 16
LEAVERS = 0.25
"""How many clients leave before their stream is over."""
SETTLED = 0.2
"""The part of a load after which memory must not grow any more."""
RSS_BYTES_PER_REQUEST_MAX = 1024.0
TOLERANCE_BYTES = 64 << 10
TOLERANCE_PART = 0.001
SWEEPS_MAX = 10
EMPTY_WHEN_SWEPT = ("kv", "prefix", "images", "draft", "workspace")


@dataclass(frozen=True, slots=True)
class Load:
    """How much, and how."""

    requests: int
    rounds: int
    clients: int = 4
    seed: int = 1

    @property
    def per_round(self) -> int:
        """Requests between two idle moments."""
        return self.requests // self.rounds


@dataclass(slots=True)
class Samples:
    """Resident memory of one process after so many requests."""

    requests: list[int] = field(default_factory=list)
    rss_nbytes: list[int] = field(default_factory=list)

    def add(self, requests: int, pid: int) -> None:
        """Take one."""
        self.requests.append(requests)
        self.rss_nbytes.append(psutil.Process(pid).memory_info().rss)

    def slope(self, since: int) -> float:
        """Return bytes a request by least squares, over the samples from `since` requests on."""
        points = [(x, y) for x, y in zip(self.requests, self.rss_nbytes, strict=True) if x >= since]
        mean_x = sum(x for x, _ in points) / len(points)
        mean_y = sum(y for _, y in points) / len(points)
        spread = sum((x - mean_x) ** 2 for x, _ in points)
        return sum((x - mean_x) * (y - mean_y) for x, y in points) / spread


@dataclass(frozen=True, slots=True)
class Pair:
    """A worker, the controller that uses it, and a client of the controller."""

    worker: WorkerProcess
    client: Client
    controller_pid: int

    async def idle(self) -> status_pb2.WorkerStatus:
        """Return the worker's status once nothing runs or waits in it."""
        return await self.worker.until(lambda s: not (s.streams_running or s.streams_waiting))

    async def sweep(self) -> status_pb2.WorkerStatus:
        """Have the worker give back what it can; return its status then.

        Once more where something is left: a client that has gone may leave its row a moment later.
        """
        for _ in range(SWEEPS_MAX):
            await self.worker.sweep()
            status = await self.idle()
            if not any(a.bytes for a in status.memory.accounts if a.name in EMPTY_WHEN_SWEPT):
                break
        return status


@asynccontextmanager
async def pair(folder: Path, *, module: str = "mlxd_worker") -> AsyncIterator[Pair]:
    """Run a worker, and a controller to which it is attached, around the body."""
    async with running_worker(module=module) as worker:
        options = ("--model", f"{NAME}={folder}", f"--worker=w={worker.address}", "--reserve", "1%")
        async with serve(*options) as server, Client(server.address) as client:
            spec = LoadSpec(
                context_length=CONTEXT, rows_max=ROWS_MAX, prefix_cache_nbytes=PREFIX_BYTES
            )
            async with client.load(NAME, options=spec) as updates:
                async for _ in updates:
                    pass
            yield Pair(worker, client, server.process.pid)


class Mix:
    """The requests of one load, drawn one by one."""

    def __init__(self, seed: int) -> None:
        self._draws = random.Random(seed)
        self._stems = [self._tokens(STEM_TOKENS_MAX) for _ in range(STEMS)]

    async def one(self, client: Client) -> None:
        """Run one request, or part of it."""
        draws = self._draws
        stem = draws.choice(self._stems)
        prompt = stem[: draws.randrange(len(stem) + 1)] + self._tokens(TAIL_TOKENS_MAX)
        new_tokens = draws.randint(1, NEW_TOKENS_MAX)
        leave_after = draws.randrange(new_tokens) if draws.random() < LEAVERS else None
        sampling = SamplingOptions(temperature=draws.choice([0.0, 0.8]), seed=draws.getrandbits(32))
        async with client.generate(
            prompt, model=NAME, max_tokens=new_tokens, sampling=sampling, ignore_eos=True
        ) as stream:
            got = 0
            if leave_after == 0:
                return
            async for event in stream:
                got += len(event.token_ids) if isinstance(event, Delta) else 0
                if leave_after is not None and got >= leave_after:
                    return
            assert got == new_tokens

    def _tokens(self, most: int) -> list[int]:
        return [self._draws.randrange(3, VOCAB) for _ in range(self._draws.randint(1, most))]


async def run_load(pair: Pair, load: Load) -> tuple[Samples, Samples]:
    """Run it, checking whenever idle; return the memory of controller and worker."""
    mix = Mix(load.seed)
    controller, worker = Samples(), Samples()
    for done in range(load.per_round, load.requests + 1, load.per_round):
        left = iter(range(load.per_round))

        async with asyncio.TaskGroup() as clients:
            for _ in range(load.clients):
                clients.create_task(_client(mix, pair.client, left))
        check_account(await pair.idle())
        controller.add(done, pair.controller_pid)
        worker.add(done, pair.worker.pid)
    return controller, worker


async def _client(mix: Mix, client: Client, left: Iterator[int]) -> None:
    for _ in left:
        await mix.one(client)


def check_account(status: status_pb2.WorkerStatus) -> None:
    """Assert that an idle worker's account is MLX's own figure, and that no row is held."""
    memory = status.memory
    assert status.state == types_pb2.MODEL_STATE_READY
    tolerance = TOLERANCE_BYTES + TOLERANCE_PART * memory.mlx_active_bytes
    assert abs(memory.unaccounted_bytes) <= tolerance, memory
    assert memory.total_bytes == sum(account.bytes for account in memory.accounts)
    assert status.kv_tokens_used == 0


def check_swept(status: status_pb2.WorkerStatus) -> None:
    """Assert that a worker without sessions that was swept holds its weights and nothing else."""
    check_account(status)
    held = {account.name: (account.bytes, account.arrays) for account in status.memory.accounts}
    left = {name: held[name] for name in EMPTY_WHEN_SWEPT if held[name] != (0, 0)}
    assert not left, f"bytes and arrays left after a sweep: {left}"
    assert held["weights"][0] > 0
