"""What Prometheus sees of a real server: under load, through the death of a worker, and secured."""

from __future__ import annotations

import asyncio
import os
import signal
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import pytest
from prometheus_client.parser import text_string_to_metric_families

from mlxd import Client, Delta, LoadSpec, MlxdError, SamplingOptions
from tests.support.cli import LIMIT_S
from tests.support.served import Served, serve
from tests.support.tiny_model import write_tiny_model

Series: TypeAlias = tuple[str, tuple[tuple[str, str], ...]]
GREEDY = SamplingOptions(temperature=0.0)
STREAMS = 3
TOKENS = 200


@dataclass(slots=True)
class Scrapes:
    """Every scrape so far, and the rule that holds between them."""

    url: str
    latest: dict[Series, float] = field(default_factory=dict)
    growing: set[Series] = field(default_factory=set)
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def take(self) -> dict[Series, float]:
        """Scrape once and hold it against the one before; one at a time."""
        async with self.turn:
            self._hold(await asyncio.to_thread(self._read))
        return self.latest

    def _hold(self, text: str) -> None:
        samples: dict[Series, float] = {}
        growing: set[Series] = set()
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                series = (sample.name, tuple(sorted(sample.labels.items())))
                assert series not in samples, series
                samples[series] = sample.value
                if family.type in {"counter", "histogram"}:
                    growing.add(series)
        for series in self.growing:
            if series in growing:
                assert samples[series] >= self.latest[series], series
            else:  # the process that it was about is gone; nothing else ever disappears
                assert "worker" in dict(series[1]), series
        self.latest, self.growing = samples, growing

    def _read(self) -> str:
        with urllib.request.urlopen(self.url, timeout=LIMIT_S) as reply:
            text: str = reply.read().decode()
        return text

    async def keep_taking(self) -> None:
        """Scrape without a pause until cancelled."""
        while True:
            await self.take()


def total(samples: dict[Series, float], name: str, **labels: str) -> float:
    """The sum over the series of this name that have these labels."""
    return sum(
        value for (n, have), value in samples.items() if n == name and labels.items() <= set(have)
    )


@asynccontextmanager
async def serve_scraped(folder: Path) -> AsyncIterator[tuple[Served, Scrapes]]:
    """A server of the tiny model, and its endpoint."""
    model = write_tiny_model(folder / "tiny")
    options = ("--model", f"tiny={model}", "--metrics", "127.0.0.1:0", "--metrics-vllm-aliases")
    async with serve(*options) as server:
        yield server, Scrapes(f"http://{server.find_logged('serving metrics')['address']}/metrics")


async def stream(client: Client, begun: asyncio.Semaphore) -> int:
    """Read one stream; tell when it has begun; return its tokens, those of a broken one too."""
    tokens = 0
    try:
        async with client.generate(
            "ab", model="tiny", sampling=GREEDY, max_tokens=TOKENS, ignore_eos=True
        ) as events:
            async for event in events:
                if isinstance(event, Delta):
                    if tokens == 0:
                        begun.release()
                    tokens += len(event.token_ids)
    except MlxdError:
        return tokens
    return tokens


@pytest.mark.asyncio
async def test_counters_never_go_back_and_restarts_show(tmp_path: Path) -> None:
    """Under load and through kill -9, every counter only grows, and the restart is plain to see."""
    async with serve_scraped(tmp_path) as (server, scrapes), Client(server.address) as client:
        taking = asyncio.create_task(scrapes.keep_taking())
        for _ in range(2):
            begun = asyncio.Semaphore(0)
            streams = [asyncio.create_task(stream(client, begun)) for _ in range(STREAMS)]
            for _ in streams:
                await asyncio.wait_for(begun.acquire(), LIMIT_S)
            await scrapes.take()
            await asyncio.gather(*streams)
        before = await scrapes.take()
        (first,) = (await client.status()).workers

        begun = asyncio.Semaphore(0)
        streams = [asyncio.create_task(stream(client, begun)) for _ in range(STREAMS)]
        await asyncio.wait_for(begun.acquire(), LIMIT_S)
        os.kill(first.pid, signal.SIGKILL)
        await asyncio.gather(*streams)
        done = await client.complete("ab", model="tiny", sampling=GREEDY, max_tokens=8)
        after = await scrapes.take()
        taking.cancel()
        await asyncio.wait([taking])
        assert taking.cancelled()  # it found nothing wrong

    assert total(before, "mlxd_requests_total", code="OK", model="tiny") == 2 * STREAMS
    assert total(before, "mlxd_generation_tokens_total") == 2 * STREAMS * TOKENS
    assert total(before, "mlxd_time_to_first_token_seconds_count") == 2 * STREAMS
    assert total(before, "mlxd_worker_restarts_total") == 0
    assert total(after, "mlxd_worker_restarts_total", model="tiny") == 1
    assert total(after, "mlxd_worker_exit_code", worker=first.incarnation) == -signal.SIGKILL
    assert total(after, "mlxd_worker_up", worker=first.incarnation) == 0
    assert total(after, "mlxd_worker_up") == 1
    born = {
        dict(have)["worker"]: value
        for (name, have), value in after.items()
        if name == "mlxd_worker_start_time_seconds"
    }
    assert first.incarnation not in born
    assert min(born.values()) > total(before, "mlxd_worker_start_time_seconds")
    assert total(after, "mlxd_start_time_seconds") == total(before, "mlxd_start_time_seconds")
    assert total(after, "vllm:kv_cache_usage_perc", model_name="tiny") <= 1
    assert done.token_ids


@pytest.mark.asyncio
async def test_memory_is_reported_by_account(tmp_path: Path) -> None:
    """What a worker holds is the sum of its accounts, and it is gone after the unload."""
    async with serve_scraped(tmp_path) as (server, scrapes), Client(server.address) as client:
        async with client.load("tiny", options=LoadSpec()) as updates:
            async for _ in updates:
                pass
        loaded = await scrapes.take()
        await client.unload("tiny")
        gone = await scrapes.take()

    accounts = total(loaded, "mlxd_worker_memory_bytes")
    assert accounts == total(loaded, "mlxd_memory_measured_bytes", model="tiny") > 0
    assert total(loaded, "mlxd_memory_reserved_bytes", model="tiny") > accounts
    assert total(gone, "mlxd_worker_memory_bytes") == 0
    assert total(gone, "mlxd_model_loads_total") == 1
    assert total(gone, "mlxd_model_evictions_total", reason="asked") == 1
