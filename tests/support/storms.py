"""A storm: many clients over more models than fit, workers killed all the time; and what is left.

Invariants:
- Clients, and the one who asks for the status, are processes of their own.
- Whoever is killed is drawn among all workers that live, ready ones and loading ones alike.
- What is left is looked at twice: when all queues are empty, with models in memory, and when these
  are unloaded, against the same server before the storm.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import grpc
import psutil

from mlxd import Client
from mlxd.messages import Status
from mlxd.v1 import status_pb2, status_pb2_grpc, worker_pb2, worker_pb2_grpc
from mlxd_shared.domain.figures import ModelState
from mlxd_shared.security.net import CHANNEL_OPTIONS
from tests.support.crowds import observe_server, storm_crowd
from tests.support.mixed_load import Samples, check_account, check_swept
from tests.support.overload import Observed, wait
from tests.support.served import Served, serve
from tests.support.storm_jobs import Scene
from tests.support.storm_tally import Tally

OBSERVED_EVERY_S = 0.05
SAMPLED_EVERY_S = 1.0
SETTLE_S_MAX = 60.0
"""What loads that are under way when the last client goes may take."""
LOOK_EVERY_S = 0.1
SAME_LOOKS = 10
LOOKS_MAX = 300
"""Looks at what the server holds: so many alike are rest, and after so many nothing changes."""
SETTLED = frozenset({ModelState.READY, ModelState.UNLOADED, ModelState.FAILED})
EXPECTED_ERRORS = frozenset({"worker died", "load failed"})
"""What the log may call an error where workers are killed."""


@dataclass(frozen=True, slots=True)
class Storm:
    """How much, and for how long. `deadline_s` 0 leaves most requests without one."""

    clients: int
    seconds: float
    kill_every_s: float
    processes: int = 2
    deadline_s: float = 0.0
    seed: int = 1


@dataclass(slots=True)
class Held:
    """What the server's process holds with no model in memory."""

    descriptors: int
    rss_nbytes: int


@dataclass(slots=True)
class Aftermath:
    """What became of a storm."""

    tally: Tally
    seen: Observed
    controller: Samples
    """Its memory, by seconds since the beginning."""
    kills: Counter[str] = field(default_factory=Counter)
    """Workers killed, by what they were doing."""
    counted: dict[str, float] = field(default_factory=dict)
    """The server's own counters, summed over their labels."""
    before: Held = field(default_factory=lambda: Held(0, 0))
    after: Held = field(default_factory=lambda: Held(0, 0))
    errors: Counter[str] = field(default_factory=Counter)
    """What the server's log calls errors."""


@dataclass(frozen=True, slots=True)
class Site:
    """A server, a client of it, and the folder of its workers' sockets."""

    server: Served
    client: Client
    run_dir: Path

    @property
    def process(self) -> psutil.Process:
        """The server's process."""
        return psutil.Process(self.server.process.pid)

    def read_held(self) -> Held:
        """Return what it holds now."""
        return Held(self.process.num_fds(), self.process.memory_info().rss)

    def sockets(self) -> set[str]:
        """Return the addresses that workers listen at, or have left behind."""
        return {f"unix:{path}" for path in self.run_dir.glob("*.sock")}

    async def at_rest(self) -> Held:
        """Return what it holds once that has not changed for a while."""
        held, same = self.read_held(), 0
        while same < SAME_LOOKS:
            await wait(LOOK_EVERY_S)
            former, held = held, self.read_held()
            same = same + 1 if held.descriptors == former.descriptors else 0
        return held

    async def back_at(self, before: Held) -> Held:
        """Return what it holds once that is no more than before; after a long while, as it is.

        What clients and workers leave is closed a moment after they have gone.
        """
        for _ in range(LOOKS_MAX):
            if self.read_held().descriptors <= before.descriptors:
                break
            await wait(LOOK_EVERY_S)
        return self.read_held()

    async def unload_all(self) -> None:
        """Have no model in memory."""
        for model in await self.client.models():
            await self.client.unload(model.name)


async def weather(scene: Scene, storm: Storm, folder: Path) -> Aftermath:
    """Run the storm; check what is left of it; return what became of it."""
    jobs_path = folder / "jobs.json"
    jobs_path.write_text(json.dumps([asdict(job) for job in scene.jobs]), encoding="utf-8")
    async with _site(scene, folder / "run") as site:
        aftermath = Aftermath(Tally(), Observed(), Samples(), before=await site.at_rest())
        async with observe_server(site.server.address, every_s=OBSERVED_EVERY_S) as watch:
            begin_s = asyncio.get_running_loop().time()
            over = asyncio.Event()
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(_sample(site, aftermath.controller, over, begin_s))
                tasks.create_task(_kill(site, storm, aftermath.kills, over))
                aftermath.tally = await storm_crowd(
                    site.server.address,
                    jobs_path,
                    clients=storm.clients,
                    processes=storm.processes,
                    seconds=storm.seconds,
                    deadline_s=storm.deadline_s,
                    seed=storm.seed,
                )
                over.set()
        aftermath.seen = watch.seen
        await _check_settled(site, aftermath)
        await site.unload_all()
        aftermath.after = await site.back_at(aftermath.before)
        assert site.process.children() == []
        assert site.sockets() == set()
    return aftermath


@asynccontextmanager
async def _site(scene: Scene, run_dir: Path) -> AsyncIterator[Site]:
    """Serve the scene around the body; every part of it has been in use once."""
    limits = ("--memory-limit", str(scene.limit_nbytes), "--keep-alive", "-1")
    options = (*scene.options, *limits, "--run-dir", str(run_dir))
    async with serve(*options) as server, Client(server.address) as client:
        site = Site(server, client, run_dir)
        await client.tokenize("once", model=next(iter(scene.folders)))
        await site.unload_all()
        yield site


async def _over(event: asyncio.Event, seconds: float) -> bool:
    """Return whether the event has come; wait at most so long for it."""
    pause = asyncio.create_task(wait(seconds))
    waiting = asyncio.create_task(event.wait())
    await asyncio.wait({pause, waiting}, return_when=asyncio.FIRST_COMPLETED)
    pause.cancel()
    waiting.cancel()
    return event.is_set()


async def _kill(site: Site, storm: Storm, kills: Counter[str], over: asyncio.Event) -> None:
    """Kill a worker now and then; whatever the machine can do, some stream ends in between."""
    draws = random.Random(storm.seed)
    complete = -1.0
    while not await _over(over, storm.kill_every_s):
        status = await site.client.status()
        former, complete = complete, _complete(status)
        if complete == former:
            continue
        states = {w.pid: w.state.value for w in status.workers if w.exit_code is None}
        workers = site.process.children()
        if not workers:
            continue
        victim = draws.choice(sorted(workers, key=lambda worker: worker.pid))
        try:
            victim.kill()
        except psutil.NoSuchProcess:
            continue  # it went by itself meanwhile
        kills[states.get(victim.pid, "starting")] += 1


def _complete(status: Status) -> float:
    """Return how many streams have come to their end."""
    (requests,) = (family for family in status.metrics if family.name == "mlxd_requests_total")
    return sum(point.value for point in requests.points if point.labels["code"] == "OK")


async def _sample(site: Site, samples: Samples, over: asyncio.Event, begin_s: float) -> None:
    """Measure the server's memory now and then."""
    while not await _over(over, SAMPLED_EVERY_S):
        elapsed_s = asyncio.get_running_loop().time() - begin_s
        samples.add(round(elapsed_s), site.server.process.pid)


async def _check_settled(site: Site, aftermath: Aftermath) -> None:
    """Wait until nothing is under way; assert that what is left is what is told, and no more."""
    async with asyncio.timeout(SETTLE_S_MAX):
        async with site.client.watch_status(interval_s=0.1) as statuses:
            async for status in statuses:
                if await _quiet(site, status):
                    break
    models = await site.client.models()
    assert [model.name for model in models if model.streams_active] == []
    ready = [model for model in models if model.state is ModelState.READY]
    status = await site.client.status()
    live = [worker for worker in status.workers if worker.exit_code is None]
    assert len(live) == len(ready)
    assert {worker.pid for worker in site.process.children()} == {worker.pid for worker in live}
    assert site.sockets() == {worker.address for worker in live}
    for worker in live:
        await _check_worker(worker.address, worker.incarnation)
    for family in status.metrics:
        aftermath.counted[family.name] = sum(point.value for point in family.points)
    for line in site.server.log_path.read_text(encoding="utf-8").splitlines():
        assert line.startswith("{"), line
        logged = json.loads(line)
        if logged["level"] == "error":
            aftermath.errors[logged["event"]] += 1


async def _quiet(site: Site, status: Status) -> bool:
    """Return whether no stream runs or waits, and no model comes or goes."""
    busy = any(worker.streams_running or worker.streams_waiting for worker in status.workers)
    return not busy and all(model.state in SETTLED for model in await site.client.models())


async def _check_worker(address: str, incarnation: str) -> None:
    """Assert that a worker's account holds, as it is and after it gave back what it can."""
    async with grpc.aio.insecure_channel(address, options=list(CHANNEL_OPTIONS)) as channel:
        status = status_pb2_grpc.StatusServiceStub(channel)
        control = worker_pb2_grpc.WorkerServiceStub(channel)
        reply = await status.GetStatus(status_pb2.GetStatusRequest())
        check_account(reply.status.workers[0])
        order = worker_pb2.ShrinkRequest(worker_incarnation=incarnation, target_bytes=0)
        await control.Shrink(order)
        reply = await status.GetStatus(status_pb2.GetStatusRequest())
        check_swept(reply.status.workers[0])
