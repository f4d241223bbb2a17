"""Thousands of mixed streams: each equals its lone run, the account holds, nothing grows."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from mlxd.v1 import inference_pb2, types_pb2
from tests.support.tiny_model import VOCAB, write_tiny_model
from tests.support.worker_process import WorkerProcess, running_worker

REQUESTS = 3000
SETTLED = 1000
AT_ONCE = 12
KINDS = 40
RSS_BYTES_PER_REQUEST_MAX = 1024


@dataclass(frozen=True, slots=True)
class Job:
    """One request, and after how many tokens its client leaves (0: it stays to the end)."""

    request: inference_pb2.GenerateRequest
    leave_after: int


def jobs() -> list[Job]:
    """Return the different requests that are mixed: lengths, seeds, samplers, departures."""
    draws = random.Random(11)
    jobs_made = []
    for seed in range(KINDS):
        prompt = [draws.randrange(3, VOCAB) for _ in range(draws.choice([1, 7, 60, 300, 700]))]
        request = inference_pb2.GenerateRequest(
            tokens=inference_pb2.TokenIds(ids=prompt),
            sampling=types_pb2.SamplingOptions(
                temperature=draws.choice([0.0, 0.7, 1.5]), seed=seed, top_k=draws.choice([0, 20])
            ),
            max_tokens=draws.choice([1, 5, 25, 60]),
            ignore_eos=True,
        )
        jobs_made.append(Job(request, draws.choice([0, 0, 0, 1, 4])))
    return jobs_made


async def run(worker: WorkerProcess, job: Job) -> list[int]:
    """Return the tokens that the job's client got before it left."""
    call = worker.inference.Generate(job.request)
    ids: list[int] = []
    async for message in call:
        ids += message.token_ids
        if job.leave_after and len(ids) >= job.leave_after:
            call.cancel()
            break
    return ids


@pytest.mark.asyncio
@pytest.mark.timeout(1800)
async def test_a_long_mixed_load(tmp_path: Path) -> None:
    """Outputs as alone, accounts that add up when idle, and at most 1 KiB of RSS a request.

    What keys and values took is kept for the next streams, and goes when memory is asked for.
    """
    folder = write_tiny_model(tmp_path / "tiny", context_max=1024)
    async with running_worker("--model", str(folder), "--rows-max", "6") as worker:
        await worker.until(lambda status: status.state == types_pb2.MODEL_STATE_READY)
        kinds = jobs()
        alone = [await run(worker, job) for job in kinds]
        process = psutil.Process(worker.pid)
        draws = random.Random(5)
        numbers = iter([draws.randrange(KINDS) for _ in range(REQUESTS)])
        done = 0
        rss_at: dict[int, int] = {}

        async def client() -> None:
            nonlocal done
            for number in numbers:
                ids = await run(worker, kinds[number])
                length = min(len(ids), len(alone[number]))
                assert ids[:length] == alone[number][:length]
                done += 1
                rss_at[done] = process.memory_info().rss

        async with asyncio.TaskGroup() as clients:
            for _ in range(AT_ONCE):
                clients.create_task(client())
        status = await worker.until(lambda s: not (s.streams_running or s.streams_waiting))
        accounts = {account.name: account.bytes for account in status.memory.accounts}
        assert accounts.pop("weights") > 0
        assert 0 < accounts.pop("prefix") <= status.prefix_cache_bytes
        assert accounts.pop("kv") >= 0
        assert set(accounts.values()) == {0}
        swept = (await worker.sweep()).memory.accounts
        assert {account.name for account in swept if account.bytes} == {"weights"}
        tolerance = 64 * 1024 + status.memory.total_bytes / 1000
        assert abs(status.memory.unaccounted_bytes) <= tolerance
        grown = rss_at[REQUESTS] - rss_at[SETTLED]
        assert grown <= RSS_BYTES_PER_REQUEST_MAX * (REQUESTS - SETTLED), grown
    assert worker.process.returncode == 0
