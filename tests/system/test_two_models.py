"""Two real models in one server: one answers while the other comes, and goes without a trace."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import psutil
import pytest

from mlxd import Client, Delta, SamplingOptions
from mlxd.v1 import worker_pb2
from mlxd_shared import config
from tests.support.calls import ids
from tests.support.cli import LIMIT_S
from tests.support.random_model import LARGE, write_dense_model
from tests.support.served import Served, serve
from tests.support.tiny_model import write_tiny_model
from tests.support.worker_process import running_worker

CONTEXT = 16384
"""Long enough that a stream without a limit goes on for as long as a test needs it to."""
GREEDY = SamplingOptions(temperature=0.0)
BEFORE_TOKENS = 300
SILENT_PART_MAX = 0.25
"""Of the time that the other model takes to load, the longest silence of the one that answers."""
SLOWER_MAX = 16.0
"""How much slower than before it may be meanwhile, on as few processors as there are."""
TRIES_MAX = 4
"""How often the other model is loaded until its load is one that can be judged."""
WEIGHTS_NBYTES = 100_000_000
"""What the large model's take, at least."""
EMPTY_NBYTES_MAX = 48 << 20
"""What a worker without a model may hold more than one that never had one."""
REQUESTS = 12


@dataclass(slots=True)
class Heard:
    """The tokens of one stream, and when they came."""

    token_ids: list[int] = field(default_factory=list)
    at_s: list[float] = field(default_factory=list)
    enough: asyncio.Event = field(default_factory=asyncio.Event)

    async def listen(self, client: Client, model: str) -> None:
        """Read a stream until its context is full or this task is cancelled."""
        async with client.generate("once", model=model, sampling=GREEDY, ignore_eos=True) as stream:
            async for event in stream:
                if isinstance(event, Delta):
                    self.token_ids += event.token_ids
                    self.at_s.append(time.monotonic())
                if len(self.token_ids) >= BEFORE_TOKENS:
                    self.enough.set()

    def gaps_s(self, begin_s: float, end_s: float) -> list[float]:
        """Return the silences between messages in a span of time."""
        return [b - a for a, b in pairwise(s for s in self.at_s if begin_s <= s <= end_s)]


@pytest.fixture(name="small", scope="module")
def small_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model with a long context."""
    return write_tiny_model(tmp_path_factory.mktemp("small"), context_max=CONTEXT)


@pytest.fixture(name="large", scope="module")
def large_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of over 100 MB."""
    return write_dense_model(tmp_path_factory.mktemp("large"), shape=LARGE)


@asynccontextmanager
async def serving(small: Path, other: Path, *options: str) -> AsyncIterator[tuple[Served, Client]]:
    """Serve two models around the body."""
    models = ("--model", f"small={small}", "--model", f"other={other}")
    async with serve(*models, *options) as server, Client(server.address) as client:
        yield server, client


def rate(gaps_s: list[float]) -> float:
    """Return messages a second."""
    return len(gaps_s) / sum(gaps_s) if gaps_s else 0.0


async def load(client: Client, model: str) -> None:
    """Have a model ready."""
    async with client.load(model) as updates:
        async for _ in updates:
            pass


@asynccontextmanager
async def listening_to(client: Client) -> AsyncIterator[Heard]:
    """Hear an endless stream of the small model around the body, and enough of it before."""
    heard = Heard()
    listening = asyncio.create_task(heard.listen(client, "small"))
    await heard.enough.wait()
    yield heard
    listening.cancel()
    await asyncio.wait({listening})
    assert listening.cancelled(), "it went on to the end"


async def heard_during_a_load(client: Client) -> tuple[Heard, bool]:
    """Load the other model; return what was heard, and whether tokens kept coming meanwhile."""
    async with listening_to(client) as heard:
        begin_s = time.monotonic()
        await load(client, "other")
        end_s = time.monotonic()
    before, during = heard.gaps_s(0.0, begin_s), heard.gaps_s(begin_s, end_s)
    silent_s = max(during, default=end_s - begin_s)
    report = {
        "load_s": end_s - begin_s,
        "tokens": len(during),
        "gap_s_max": [max(before), silent_s],
        "tokens_per_s": [rate(before), rate(during)],
    }
    sys.stdout.write(json.dumps(report) + "\n")
    no_silence = silent_s <= SILENT_PART_MAX * (end_s - begin_s)
    return heard, no_silence and rate(during) >= rate(before) / SLOWER_MAX


def workers_of(server: Served) -> list[psutil.Process]:
    """Return the processes of the server's workers."""
    return psutil.Process(server.process.pid).children(recursive=True)


def resident_nbytes(processes: list[psutil.Process]) -> int:
    """Return what processes hold, as the system counts it."""
    return sum(process.memory_info().rss for process in processes)


@pytest.mark.timeout(TRIES_MAX * LIMIT_S)
@pytest.mark.asyncio
async def test_one_answers_while_the_other_loads_and_goes_with_all_its_memory(
    small: Path, large: Path
) -> None:
    """Tokens keep coming during a load, and they are the same; an unload ends the process, and the
    memory of the one that stays is all that is held.
    """
    async with serving(small, large) as (server, client):
        await load(client, "small")
        alone = resident_nbytes(workers_of(server))
        for _ in range(TRIES_MAX):  # a machine that stalls hides what there is to hear
            heard, keeps_coming = await heard_during_a_load(client)
            if keeps_coming:
                break
            await client.unload("other")
        assert keeps_coming

        held = {worker.pid: resident_nbytes([worker]) for worker in workers_of(server)}
        sys.stdout.write(f"{alone >> 20} MiB, then {held}\n")
        assert sum(held.values()) - alone > WEIGHTS_NBYTES
        await client.unload("other")
        left = workers_of(server)
        (gone,) = held.keys() - {worker.pid for worker in left}
        assert not psutil.pid_exists(gone)
        assert held[gone] > WEIGHTS_NBYTES
        assert resident_nbytes(left) <= sum(held.values()) - WEIGHTS_NBYTES
        status = await client.status()
        assert [worker.pid for worker in status.workers] == [worker.pid for worker in left]

        async with listening_to(client) as again:
            pass
        assert again.token_ids[:BEFORE_TOKENS] == heard.token_ids[:BEFORE_TOKENS]


@pytest.mark.asyncio
async def test_a_worker_that_stays_gives_its_models_memory_back(small: Path, large: Path) -> None:
    """After Unload the process holds what it held before it had any model, and can load again."""
    async with running_worker() as worker:
        process = psutil.Process(worker.pid)
        await worker.load(small)
        await worker.control.Unload(worker_pb2.UnloadRequest(worker_incarnation=worker.incarnation))
        empty = process.memory_info().rss
        for _ in range(2):
            await worker.load(large, context_length=1024)
            assert await ids(worker)
            loaded = process.memory_info().rss
            unloaded = await worker.control.Unload(
                worker_pb2.UnloadRequest(worker_incarnation=worker.incarnation)
            )
            left = process.memory_info().rss
            sys.stdout.write(f"{empty >> 20} {loaded >> 20} {left >> 20} MiB\n")
            assert loaded - empty > WEIGHTS_NBYTES
            assert unloaded.mlx_active_bytes <= 64 * config.KIB
            assert left - empty <= EMPTY_NBYTES_MAX


@pytest.mark.asyncio
async def test_requests_by_turns_are_collated(small: Path, tmp_path: Path) -> None:
    """A B A B with room for one: each model is loaded once, so nobody waits for many loads."""
    other = write_tiny_model(tmp_path / "other", seed=2)
    async with serving(small, other, "--max-loaded", "1") as (_, client):
        models = [("small", "other")[number % 2] for number in range(REQUESTS)]
        await asyncio.gather(
            *(client.complete("once", model=m, sampling=GREEDY, max_tokens=8) for m in models)
        )
        status = await client.status()
        (loads,) = (f for f in status.metrics if f.name == "mlxd_model_loads_total")
        assert {point.labels["model"]: point.value for point in loads.points} == {
            "small": 1,
            "other": 1,
        }
