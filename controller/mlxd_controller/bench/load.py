"""The load generator, a process of its own: one JSON job on standard input, its outcomes on output.

All clients live on one event loop. With a closed loop each client takes the next request as soon as
its last one has ended; requests with a time of their own, or that follow another's first token, are
sent then, whoever is busy, over the clients' connections in turn.
"""

from __future__ import annotations

import asyncio
import gc
import sys
from collections.abc import Callable, Iterator, Mapping

from mlxd_controller.bench.clients import Client, GrpcClient
from mlxd_controller.bench.requests import GRPC, SETTLED, Job, Request, job_from_json
from mlxd_shared.ops.measuring import Outcome, outcomes_to_json

MakeClient = Callable[[Job], Client]
"""Makes a client of a job's target and model."""
OURS: Mapping[str, MakeClient] = {GRPC: lambda job: GrpcClient(job.target, job.model, job.security)}


async def run(job: Job, kinds: Mapping[str, MakeClient] = OURS) -> list[Outcome]:
    """Carry a job out; the outcomes are in the requests' order.

    kinds: what makes clients, by the job's kind.
    """
    clients = [kinds[job.kind](job) for _ in range(job.clients)]
    try:
        await asyncio.gather(*(client.ready() for client in clients))
        for request in job.settling:
            await clients[0].ask(request, lambda: None)
        gc.freeze()
        if job.together:
            await asyncio.to_thread(_wait_for_others)
        return await _load(job, clients)
    finally:
        await asyncio.gather(*(client.close() for client in clients))


def _wait_for_others() -> None:
    """Say that this one has settled, and wait until all have."""
    sys.stdout.write(f"{SETTLED}\n")
    sys.stdout.flush()
    if not sys.stdin.buffer.readline():
        message = "nobody is there to say that all have settled"
        raise RuntimeError(message)


async def _load(job: Job, clients: list[Client]) -> list[Outcome]:
    outcomes: dict[int, Outcome] = {}
    firsts = [asyncio.Event() for _ in job.requests]
    loop = asyncio.get_running_loop()
    begin_s = loop.time()

    async def ask(client: Client, index: int, request: Request) -> None:
        outcomes[index] = await client.ask(request, firsts[index].set)

    async def run_timed(client: Client, index: int, request: Request) -> None:
        if request.after is not None:
            await firsts[request.after].wait()
        if request.at_s is not None:
            await asyncio.sleep(begin_s + request.at_s - loop.time())
        await ask(client, index, request)

    async def run_closed(client: Client, left: Iterator[tuple[int, Request]]) -> None:
        for index, request in left:
            await ask(client, index, request)

    numbered = list(enumerate(job.requests))
    free = iter([(i, r) for i, r in numbered if r.at_s is None and r.after is None])
    async with asyncio.TaskGroup() as tasks:
        for index, request in numbered:
            if request.at_s is not None or request.after is not None:
                tasks.create_task(run_timed(clients[index % len(clients)], index, request))
        for client in clients:
            tasks.create_task(run_closed(client, free))
    return [outcomes[index] for index in range(len(job.requests))]


def main(kinds: Mapping[str, MakeClient] = OURS) -> None:
    """Read a job, carry it out, write the outcomes."""
    job = job_from_json(sys.stdin.buffer.readline())
    sys.stdout.write(outcomes_to_json(asyncio.run(run(job, kinds))) + "\n")


if __name__ == "__main__":
    main()
