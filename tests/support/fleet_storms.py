"""A storm over a fleet: many clients of six models, while nodes and controllers are lost.

Invariants:
- Nodes are Ray's, on this machine; any two have memory for all models, so that a loss costs what
  was lost, and no eviction besides. Who is lost is the one with the most streams, where anybody can
  say.
- A node that was killed joins again after a while, as one that was stopped does: its raylet's start
  is another machine's work, and would take the cores of those that are left. A controller that was
  killed is followed by the next one at the same address. So at the end all are there.
- Clients resume streams whose server was lost. They are processes of their own.
"""

from __future__ import annotations

import asyncio
import json
import math
import sys
import time
from collections import Counter
from collections.abc import Collection
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path

from mlxd import Client, MlxdError
from tests.support.crowds import storm_crowd
from tests.support.overload import wait
from tests.support.ports import own_port
from tests.support.ray_clusters import QUIET, RayCluster, ray_cluster, tls_folder
from tests.support.served import Served, serve
from tests.support.storm import LASTING
from tests.support.storm_jobs import Scene
from tests.support.storm_tally import Tally
from tests.support.worker_process import ROOT

NODES = ("a", "b", "c")
KILL, JOIN, STOP, CONTINUE, CONTROLLER = "kill", "join", "stop", "continue", "controller"
STATUS_S_MAX = 5.0
"""How long a server may take to say who has streams, before somebody else is lost."""
REACHED_S_MAX = 120.0
MEASURED_AT = 0.44
"""The part of the time after which memory and calls are measured: of ten minutes, a calm moment."""


@dataclass(frozen=True, slots=True)
class FleetStorm:
    """How much, for how long, and when what is lost. `controller_kills` are parts of the time."""

    seconds: float
    clients: int = 60
    processes: int = 2
    pause_s: float = 8.0
    """The most that a client waits between two requests: with this two cores are not yet full."""
    kill_every_s: float = 40.0
    stop_every_s: float = 90.0
    first_stop_s: float = 25.0
    gone_s: float = 12.0
    """How long a node is gone that was killed or stopped."""
    room: float = 1.4
    """Each node's memory, as a multiple of what half of the models take."""
    controller_kills: tuple[float, ...] = (0.15, 0.88)
    seed: int = 1

    def list_strokes(self) -> list[tuple[float, str]]:
        """Return what befalls nodes, and after how many seconds, in order."""
        kills = _times(self.kill_every_s, self.kill_every_s, self.seconds)
        stops = _times(self.first_stop_s, self.stop_every_s, self.seconds)
        strokes = [(at_s, KILL) for at_s in kills] + [(at_s, STOP) for at_s in stops]
        returns = [(at_s + self.gone_s, JOIN) for at_s in kills]
        returns += [(at_s + self.gone_s, CONTINUE) for at_s in stops]
        return sorted([*strokes, *returns])


@dataclass(slots=True)
class FleetAftermath:
    """What became of a storm over a fleet."""

    tally: Tally = field(default_factory=Tally)
    strokes: list[tuple[float, str]] = field(default_factory=list)
    """What befell, and when by the system's own clock."""
    cluster_s: float = 0.0
    """What the cluster took to start."""
    start_s: list[float] = field(default_factory=list)
    """What each controller took until it listened."""
    adopted: list[int] = field(default_factory=list)
    """Workers that each controller took over."""
    memory: list[dict[str, float]] = field(default_factory=list)
    """Of each node, in MB."""
    calls_ms: list[float] = field(default_factory=list)


class Controllers:
    """One controller after another, at one address."""

    def __init__(
        self, stack: AsyncExitStack, address: str, options: tuple[str, ...], seen: FleetAftermath
    ) -> None:
        self.address = address
        self._stack = stack
        self._options = options
        self._seen = seen
        self._served: Served | None = None

    async def start(self) -> None:
        """Start the next one."""
        begin_s = time.monotonic()
        serving = serve(*self._options, address=self.address, environment=QUIET)
        self._served = await self._stack.enter_async_context(serving)
        self._seen.start_s.append(time.monotonic() - begin_s)
        self._seen.adopted.append(self._served.count("worker adopted"))

    async def kill(self) -> None:
        """Kill the present one."""
        assert self._served is not None
        self._served.process.kill()
        await self._served.process.wait()


async def weather_fleet(scene: Scene, storm: FleetStorm, folder: Path) -> FleetAftermath:
    """Run the storm; check that all nodes are back, and nothing runs on them; return what became
    of it.
    """
    seen = FleetAftermath()
    jobs_path = folder / "jobs.json"
    jobs_path.write_text(json.dumps([asdict(job) for job in scene.jobs]), encoding="utf-8")
    begin_s = time.monotonic()
    async with ray_cluster(*NODES) as cluster, AsyncExitStack() as stack:
        seen.cluster_s = time.monotonic() - begin_s
        tls = tls_folder(folder / "tls")
        limit_nbytes = int(storm.room * scene.limit_nbytes)
        options = (
            *("--fleet", f"ray://{cluster.address}", "--fleet-tls", str(tls)),
            *("--memory-limit", str(limit_nbytes), "--reserve", "1%", "--keep-alive", "-1"),
            *("--models-dir", "none", "--hub-cache", "none", "--ollama-models", "none"),
            *("--orphan-grace", "60s", *scene.options),
        )
        controllers = Controllers(stack, stack.enter_context(own_port()), options, seen)
        await controllers.start()
        client = await stack.enter_async_context(Client(controllers.address))
        await _until_reached(client)
        for name in scene.folders:
            await client.tokenize("once", model=name)
        begin_s = time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            crowd = tasks.create_task(
                storm_crowd(
                    controllers.address,
                    jobs_path,
                    *(LASTING, str(storm.pause_s)),
                    clients=storm.clients,
                    processes=storm.processes,
                    seconds=storm.seconds,
                    deadline_s=0.0,
                    seed=storm.seed,
                )
            )
            tasks.create_task(_strike(cluster, client, storm, begin_s, seen))
            tasks.create_task(_replace(controllers, storm, begin_s, seen))
            tasks.create_task(_measure(cluster, storm, begin_s, seen))
        seen.tally = crowd.result()
        await _check_over(controllers.address)
    return seen


async def _check_over(address: str) -> None:
    """Wait until all nodes are back; assert that nothing runs there once models are unloaded."""
    async with Client(address) as client:
        await _until_reached(client)
        for model in await client.models():
            await client.unload(model.name)
        status = await client.status()
        assert [worker for worker in status.workers if worker.exit_code is None] == []


def _times(first_s: float, every_s: float, end_s: float) -> list[float]:
    count = max(math.ceil((end_s - first_s) / every_s), 0)
    return [first_s + number * every_s for number in range(count)]


async def _until_reached(client: Client) -> None:
    """Wait until each node is reached."""
    async with (
        asyncio.timeout(REACHED_S_MAX),
        client.watch_status(interval_s=0.1) as statuses,
    ):
        async for status in statuses:
            if {device.machine for device in status.devices if not device.lost} == set(NODES):
                return


async def _strike(
    cluster: RayCluster,
    client: Client,
    storm: FleetStorm,
    begin_s: float,
    seen: FleetAftermath,
) -> None:
    """Kill and stop nodes, one after another; in the end all are there."""
    gone: dict[str, str] = {}
    for at_s, what in storm.list_strokes():
        await _wait_until(begin_s + at_s)
        if what in (JOIN, CONTINUE):
            await cluster.order(what, gone.pop(what))
            continue
        name = await _find_busiest(client, [node for node in NODES if node not in gone.values()])
        seen.strokes.append((time.monotonic(), what))
        await cluster.order(what, name)
        gone[CONTINUE if what == STOP else JOIN] = name


async def _find_busiest(client: Client, names: Collection[str]) -> str:
    """Return the node with the most streams and workers; any where nobody can say."""
    held: Counter[str] = Counter(dict.fromkeys(names, 0))
    try:
        status = await asyncio.wait_for(client.status(), STATUS_S_MAX)
    except (MlxdError, TimeoutError):
        return max(names)
    for worker in status.workers:
        for device in worker.memory.devices if worker.exit_code is None else ():
            if (name := device.partition("/")[0]) in held:
                held[name] += 1 + worker.streams_running
    return max(held, key=lambda name: held[name])


async def _replace(
    controllers: Controllers, storm: FleetStorm, begin_s: float, seen: FleetAftermath
) -> None:
    """Kill a controller, and start the next one, again and again."""
    for part in storm.controller_kills:
        await _wait_until(begin_s + part * storm.seconds)
        seen.strokes.append((time.monotonic(), CONTROLLER))
        await controllers.kill()
        await controllers.start()


async def _measure(
    cluster: RayCluster, storm: FleetStorm, begin_s: float, seen: FleetAftermath
) -> None:
    """Measure each node's memory, and calls to the agent of one, in the middle of the storm."""
    await _wait_until(begin_s + MEASURED_AT * storm.seconds)
    seen.memory = [await cluster.memory(name) for name in NODES]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.support.agent_calls", cluster.address, NODES[0]),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        cwd=ROOT,
    )
    output, _ = await process.communicate()
    if process.returncode == 0 and output:  # else its node, or its own raylet, was lost meanwhile
        seen.calls_ms = json.loads(output)


async def _wait_until(at_s: float) -> None:
    await wait(max(at_s - time.monotonic(), 0.0))
