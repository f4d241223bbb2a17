"""`mlxd serve --fleet` over a real Ray cluster on this machine: raylets killed, stopped, rejoined.

Workers listen on this machine's own address where it has one, with TLS and a token.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any

import psutil
import pytest

from mlxd import Client, Delta, Finished, SamplingOptions
from mlxd.messages import Status
from tests.support.cli import mlxd
from tests.support.effort import examples, spread_evenly
from tests.support.ray_clusters import QUIET, RayCluster, ray_cluster, tls_folder
from tests.support.served import Served, serve
from tests.support.tiny_model import write_tiny_model

TOKENS = examples(3000, few=1200, in_ci=1200)
BEFORE_LOSS = 100
LIMIT_S = 100.0
NEWS_S_MAX = 1.0
"""From a raylet's end to its node's loss. Ray alone holds calls that failed for 1 to 2 s."""
TRIES = 3
"""Of what time alone decides."""
SOON_TIRED = {"RAY_NUM_REDIS_GET_RETRIES": "1"}
"""For a process of Ray's that is refused: tries of a second each, 20 by default."""
TOKEN = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "a-secret-of-this-test-and-of-no-other-one"}
WRONG_TOKENS = spread_evenly(({**TOKEN, "RAY_AUTH_TOKEN": "another"}, {}), 1, in_ci=1)

pytestmark = pytest.mark.timeout(300)


@asynccontextmanager
async def controller(
    cluster: RayCluster,
    folder: Path,
    *options: str,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> AsyncIterator[tuple[Served, Client]]:
    """Serve a tiny model on the cluster around the body."""
    model, tls = folder / "tiny", folder / "tls"
    if not model.exists():
        write_tiny_model(model, context_max=16384)
        tls_folder(tls)
    fleet = ("--fleet", f"ray://{cluster.address}", "--fleet-tls", str(tls))
    limits = ("--memory-limit", "1G", "--reserve", "1%")
    stores = ("--models-dir", "none", "--hub-cache", "none", "--ollama-models", "none")
    async with (
        serve(
            *("--model", f"tiny={model}", *fleet, *limits, *stores, *options),
            environment={**QUIET, **environment},
        ) as served,
        Client(served.address, timeout_s=LIMIT_S) as client,
    ):
        yield served, client


async def until(client: Client, holds: Callable[[Status], bool]) -> None:
    """Wait until the status is so."""
    async with asyncio.timeout(LIMIT_S), client.watch_status(interval_s=0.1) as statuses:
        async for status in statuses:
            if holds(status):
                return


def only_reach(*names: str) -> Callable[[Status], bool]:
    """Return whether just these machines are reached."""
    return lambda status: {d.machine for d in status.devices if not d.lost} == set(names)


async def where(client: Client) -> str:
    """Return the machine on which the model runs."""
    return (await client.model("tiny")).device.partition("/")[0]


async def stream(
    client: Client, lose: Callable[[], Awaitable[None]] | None = None
) -> tuple[list[int], int, float]:
    """Return a stream's ids, its migrations and its longest gap; `lose` is done in the middle."""
    ids: list[int] = []
    gap_s, last_s = 0.0, 0.0
    sampling = SamplingOptions(temperature=0.0)
    async with client.generate(
        "ab", model="tiny", max_tokens=TOKENS, ignore_eos=True, sampling=sampling
    ) as events:
        async for event in events:
            if isinstance(event, Finished):
                return ids, event.usage.migrations, gap_s
            if isinstance(event, Delta):
                now_s = time.monotonic()
                gap_s, last_s = max(gap_s, now_s - (last_s or now_s)), now_s
                ids += event.token_ids
            if lose is not None and len(ids) >= BEFORE_LOSS:
                await lose()
                lose = None
    raise AssertionError("the stream had no end")


async def kill(cluster: RayCluster, served: Served, client: Client, name: str) -> float:
    """Kill a node of `a` and `b`, and have it join again; return how many seconds its loss took."""
    begin_s = time.time()
    await cluster.order("kill", name)
    await until(client, only_reach(*{"a", "b"} - {name}))
    lost = datetime.fromisoformat(served.list_logged("node lost")[-1]["timestamp"])
    await cluster.order("join", name)
    await until(client, only_reach("a", "b"))
    return lost.timestamp() - begin_s


@pytest.mark.asyncio
async def test_a_fleet_on_ray_loses_nodes_and_streams_go_on(tmp_path: Path) -> None:
    """A raylet killed, another one stopped: equal tokens; who comes back is used again.

    Workers run at the priority of their node's raylet, and its end is known within a second. Stdout
    has nothing but where the server listens.
    """
    async with ray_cluster("a", "b") as cluster, controller(cluster, tmp_path) as (served, client):
        await until(client, only_reach("a", "b"))
        undisturbed, migrations, _ = await stream(client)
        assert migrations == 0

        (worker,) = (await client.status()).workers
        assert psutil.Process(worker.pid).nice() == psutil.Process(cluster.process.pid).nice()

        first = await where(client)
        second = "b" if first == "a" else "a"
        ids, migrations, killed_s = await stream(client, lambda: cluster.order("kill", first))
        assert (ids, migrations) == (undisturbed, 1)
        assert await where(client) == second
        await cluster.order("join", first)
        await until(client, only_reach("a", "b"))

        ids, migrations, silent_s = await stream(client, lambda: cluster.order("stop", second))
        assert (ids, migrations) == (undisturbed, 1)
        assert await where(client) == first
        await cluster.order("continue", second)
        await until(client, only_reach("a", "b"))

        news_s: list[float] = []
        while len(news_s) < TRIES and min(news_s, default=LIMIT_S) > NEWS_S_MAX:
            news_s.append(await kill(cluster, served, client, second))
        assert min(news_s) <= NEWS_S_MAX

        served.process.send_signal(signal.SIGTERM)
        assert served.process.stdout is not None
        assert await served.process.stdout.read() == b""  # Ray tells of nodes on stderr
        gaps = f"gap after a kill {killed_s:.2f} s, after a silence {silent_s:.2f} s"
        print(f"{gaps}; news of a kill after {min(news_s):.2f} s")  # noqa: T201


@pytest.mark.asyncio
async def test_a_controller_that_was_killed_has_its_workers_adopted(tmp_path: Path) -> None:
    """Through agents that outlive it: the same process serves on, and is listed by machine.

    Ray asks all processes for a token here: who has none, or another one, is refused.
    """
    async with ray_cluster("a", environment=TOKEN) as cluster:
        for wrong in WRONG_TOKENS:
            fleet = ("--fleet", f"ray://{cluster.address}", "--address", "127.0.0.1:0")
            environment: dict[str, Any] = {**QUIET, **SOON_TIRED, **wrong}
            refused = await mlxd("serve", *fleet, **environment)
            assert refused.code == 2
            last = refused.err.splitlines()[-1]
            assert f"ray://{cluster.address}" in last
            assert "another token (RAY_AUTH_MODE, RAY_AUTH_TOKEN)" in last
        async with controller(cluster, tmp_path, environment=TOKEN) as (served, client):
            assert not served.count("Ray asks nobody for a token")
            before, _, _ = await stream(client)
            (worker,) = (await client.status()).workers
            served.process.send_signal(signal.SIGKILL)
            await served.process.wait()
        async with controller(cluster, tmp_path, environment=TOKEN) as (served, client):
            (adopted,) = (await client.status()).workers
            assert (adopted.pid, adopted.incarnation) == (worker.pid, worker.incarnation)
            assert (await stream(client))[0] == before
            listed = await mlxd("--address", served.address, "fleet", "status")
            assert listed.rows[1][:3] == ["a", "reached", "a/cpu (cpu)"]
            assert listed.rows[1][-1] == "tiny"


@pytest.mark.asyncio
async def test_a_cluster_that_is_not_there_is_refused_by_name() -> None:
    """At the start, with what was asked for."""
    done = await mlxd("serve", "--fleet", "ray://127.0.0.1:9", "--address", "127.0.0.1:0")
    assert done.code == 2
    assert "fleet: ray://127.0.0.1:9" in done.err
