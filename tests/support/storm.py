"""Clients that want several models at once, as a process of their own.

    python -m tests.support.storm ADDRESS JOBS CLIENTS SECONDS DEADLINE_S SEED [lasting PAUSE_S]

JOBS is a file of requests, each with what it got when nobody was beside it. Every client asks for
one after another until the time is over, leaves some of them before their end, and comes back when
it is told to. `lasting` streams are resumed when their server is lost, and clients wait up to
PAUSE_S between two requests. Prints what became of them as one JSON object.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import grpc

from mlxd import (
    Client,
    Delta,
    Finished,
    MlxdError,
    RemoteError,
    SamplingOptions,
    Stream,
)
from mlxd_shared.domain.errors import (
    DeadlinePassed,
    ModelDraining,
    ModelLoading,
    NoRoom,
    QueueFull,
    WorkerExited,
    WorkerLost,
)
from mlxd_shared.wire.status import TABLE
from tests.support.overload import wait
from tests.support.storm_tally import Got, Job, Tally

LEAVERS = 0.15
"""How many clients leave a stream before its end: half of them by a count, half by the clock."""
LEAVE_S_MAX = 2.0
HURRIED = 0.05
"""How many requests have a deadline, where not all have one."""
HURRY_S = (1.0, 5.0)
HANG_S = 180.0
"""A request that has not ended by itself after so long hangs: more than all its waits together."""
LASTING = "lasting"
PAUSE_S = 0.5
"""What a client waits that was told of a loss."""
DOCUMENTED = (DeadlinePassed, ModelLoading, NoRoom, QueueFull, WorkerExited, WorkerLost)
"""What a request may be refused with where models are many, memory is short and workers die."""
REASONS = {row.error: row.reason for row in TABLE}


class Clients:
    """Those of one process."""

    def __init__(
        self,
        client: Client,
        jobs: Sequence[Job],
        *,
        end_s: float,
        deadline_s: float,
        lasting_s: float | None = None,
    ) -> None:
        """Ask until `end_s`; all requests have this deadline, or, where it is 0, a few have one.

        lasting_s: streams are resumed, and clients wait up to so long between two.
        """
        self.tally = Tally()
        self._client = client
        self._end_s = end_s
        self._deadline_s = deadline_s
        self._lasting_s = lasting_s
        self._jobs: dict[str, list[Job]] = {}
        for job in jobs:
            self._jobs.setdefault(job.model, []).append(job)

    async def run(self, draws: random.Random) -> None:
        """Be one client: one request after another, of one model more often than of the next."""
        models = sorted(self._jobs)
        wants = [1 / rank for rank in range(1, len(models) + 1)]
        while (left_s := self._end_s - time.monotonic()) > 0:
            (model,) = draws.choices(models, wants)
            pause_s = await self._one(draws.choice(self._jobs[model]), draws)
            if self._lasting_s is not None:
                pause_s = max(pause_s, draws.uniform(0, self._lasting_s))
            if pause_s:
                await wait(min(pause_s, left_s))

    async def _one(self, job: Job, draws: random.Random) -> float:
        """Have one request served, or leave it; return what to wait before the next one."""
        leaves, by_clock = draws.random() < LEAVERS, draws.random() < 0.5
        leave_s = draws.uniform(0, LEAVE_S_MAX) if leaves and by_clock else None
        leave_tokens = draws.randrange(job.max_tokens) if leaves and not by_clock else None
        deadline_s = self._deadline_s or None
        if deadline_s is None and draws.random() < HURRIED:
            deadline_s = draws.uniform(*HURRY_S)
        self.tally.begun += 1
        got = Got(job, time.monotonic())
        try:
            async with asyncio.timeout(HANG_S if leave_s is None else leave_s):
                await self._read(got, leave_tokens=leave_tokens, deadline_s=deadline_s)
        except TimeoutError:
            if leave_s is None:
                self.tally.saw_hanging(got)
            else:
                self.tally.saw_left(got)
        except MlxdError as error:
            return self._count_refusal(got, error, hurried=deadline_s is not None)
        else:
            if got.finished is None:
                self.tally.saw_left(got)
            else:
                self.tally.saw_complete(got)
        return 0.0

    async def _read(self, got: Got, *, leave_tokens: int | None, deadline_s: float | None) -> None:
        """Read the stream to its end, or until the client has had so many tokens."""
        lasting = self._lasting_s is not None
        async with stream_of(
            self._client, got.job, timeout_s=deadline_s, reconnect=lasting
        ) as stream:
            async for event in stream:
                got.hear(event)
                if leave_tokens is not None and len(got.token_ids) >= leave_tokens:
                    return

    def _count_refusal(self, got: Got, error: MlxdError, *, hurried: bool) -> float:
        """Count a status; return what it says about coming back."""
        reason = documented_reason(error, hurried=hurried)
        if reason is None:
            self.tally.saw_undocumented(got, f"{type(error).__name__}: {error}")
        else:
            self.tally.saw_status(got, reason)
        if isinstance(error, NoRoom | QueueFull | ModelLoading | ModelDraining):
            return error.retry_after_s
        return PAUSE_S


def documented_reason(error: MlxdError, *, hurried: bool) -> str | None:
    """Return the documented reason that `error` ends a request with; None: it never should.

    hurried: the request has a deadline. Only then may it be told that this has passed, or that its
    model is held for another one (decision 0010): nobody unloads anything during a storm, and who
    has time waits until the hold is over.
    """
    match error:
        case RemoteError(grpc.StatusCode.DEADLINE_EXCEEDED) if hurried:
            return "DEADLINE_EXCEEDED"
        case ModelDraining() if hurried:
            return REASONS[ModelDraining]
        case _:
            return REASONS[type(error)] if isinstance(error, DOCUMENTED) else None


def stream_of(
    client: Client, job: Job, *, timeout_s: float | None = None, reconnect: bool = False
) -> Stream[Delta | Finished]:
    """Begin the request and return its stream."""
    return client.generate(
        job.prompt,
        model=job.model,
        max_tokens=job.max_tokens,
        sampling=SamplingOptions(temperature=job.temperature, seed=job.seed),
        ignore_eos=True,
        timeout_s=timeout_s,
        reconnect=reconnect,
    )


async def crowd(
    address: str,
    jobs: Sequence[Job],
    *,
    clients: int,
    seconds: float,
    deadline_s: float,
    seed: str,
    lasting_s: float | None = None,
) -> Tally:
    """Run so many clients for so long; return what became of their requests."""
    async with Client(address) as client:
        end_s = time.monotonic() + seconds
        crowd_clients = Clients(
            client, jobs, end_s=end_s, deadline_s=deadline_s, lasting_s=lasting_s
        )
        async with asyncio.TaskGroup() as tasks:
            for number in range(clients):
                tasks.create_task(crowd_clients.run(random.Random(f"{seed}-{number}")))
    return crowd_clients.tally


def read_jobs(path: Path) -> list[Job]:
    """Return the requests in a file."""
    records = json.loads(path.read_text(encoding="utf-8"))
    return [Job(**{**job, "token_ids": tuple(job["token_ids"])}) for job in records]


def main() -> None:
    """Do what the command line says."""
    address, jobs_path, clients, seconds, deadline_s, seed, *further = sys.argv[1:]
    tally = asyncio.run(
        crowd(
            address,
            read_jobs(Path(jobs_path)),
            clients=int(clients),
            seconds=float(seconds),
            deadline_s=float(deadline_s),
            seed=seed,
            lasting_s=float(further[1]) if further[:1] == [LASTING] else None,
        )
    )
    sys.stdout.write(json.dumps(asdict(tally)))


if __name__ == "__main__":
    main()
