"""Workers that somebody else started, behind a real controller: loaded, unloaded, never ended.

Both sides are processes with the commands that docker/compose.yaml has; either side restarts.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from mlxd import Client, MlxdError, SamplingOptions
from mlxd.messages import WorkerStatus
from mlxd.v1 import types_pb2
from mlxd_shared.domain.errors import WorkerTimedOut
from mlxd_shared.domain.figures import ModelState
from tests.support.certificates import Authority, token_file
from tests.support.cli import LIMIT_S
from tests.support.effort import spread_evenly
from tests.support.ports import own_port
from tests.support.served import Served, serve
from tests.support.tiny_model import write_tiny_model
from tests.support.worker_process import WorkerProcess, running_worker

GREEDY = SamplingOptions(temperature=0.0)
CONTEXT = 16384
"""Long enough that a stream without a limit goes on for as long as a test needs it to."""


@dataclass(slots=True)
class Models:
    """Two models, as options of `mlxd serve`."""

    a: Path
    b: Path

    @property
    def options(self) -> tuple[str, ...]:
        """Offer both."""
        return ("--model", f"a={self.a}", "--model", f"b={self.b}", "--reserve", "1%")


@pytest.fixture
def models(tmp_path: Path) -> Models:
    """Two tiny models that differ."""
    return Models(
        write_tiny_model(tmp_path / "a"), write_tiny_model(tmp_path / "b", seed=2, context_max=256)
    )


@asynccontextmanager
async def controller(
    models: Models, *addresses: str, options: tuple[str, ...] = (), wait_s: int = 60
) -> AsyncIterator[tuple[Served, Client]]:
    """A controller of these workers, and a client of it; a load waits `wait_s` for a worker."""
    workers = [f"--worker=w{number}={address}" for number, address in enumerate(addresses, start=1)]
    async with (
        serve(*models.options, *workers, *options, "--load-timeout", f"{wait_s}s") as server,
        Client(server.address, timeout_s=LIMIT_S) as client,
    ):
        yield server, client


async def text_of(client: Client, model: str) -> str:
    """Eight greedy tokens."""
    done = await client.complete("ab", model=model, sampling=GREEDY, max_tokens=8)
    return done.text


async def only_worker(client: Client) -> WorkerStatus:
    """The one worker that is not dead."""
    (worker,) = [w for w in (await client.status()).workers if w.exit_code is None]
    return worker


async def until_state(client: Client, model: str, state: ModelState) -> None:
    """Wait until the model is in this state."""
    async with asyncio.timeout(LIMIT_S), client.watch_models(model) as changes:
        async for change in changes:
            if change.state is state:
                return


async def phase_of(worker: WorkerProcess) -> tuple[str, int]:
    """What the worker itself says it holds, and since when it has read weights."""
    own = await worker.own_status()
    return own.model_name, own.memory.total_bytes


@pytest.mark.asyncio
async def test_an_attached_worker_serves_loads_and_unloads(models: Models) -> None:
    """One model takes the other's place in it; unloading empties it; its process goes on."""
    async with running_worker(listen="tcp:127.0.0.1:0") as worker:
        async with controller(models, worker.address) as (_, client):
            first = await text_of(client, "a")
            second = await text_of(client, "b")
            assert (await phase_of(worker))[0] == "b"
            assert await text_of(client, "a") == first != second
            status = await only_worker(client)
            assert (status.pid, status.incarnation) == (worker.pid, worker.incarnation)
            assert status.memory.resident_nbytes > 0

            await client.unload("a")
            assert await phase_of(worker) == ("", 0)
            assert {m.state for m in await client.models()} == {ModelState.UNLOADED}
            await text_of(client, "b")
        name, nbytes = await phase_of(worker)

    assert name == "b"
    assert nbytes > 0


@pytest.mark.asyncio
@pytest.mark.parametrize("how", spread_evenly([signal.SIGTERM, signal.SIGKILL], 1))
async def test_a_controller_that_restarts_finds_the_model_loaded(
    models: Models, how: signal.Signals
) -> None:
    """However it ended, the next one serves from the same load: the weights are read once."""
    async with running_worker("--log-format", "json", listen="tcp:127.0.0.1:0") as worker:
        async with controller(models, worker.address) as (server, client):
            before = await text_of(client, "a")
            server.process.send_signal(how)
            await asyncio.wait_for(server.process.wait(), LIMIT_S)
        assert (await phase_of(worker))[0] == "a"
        async with controller(models, worker.address) as (server, client):
            await until_state(client, "a", ModelState.READY)
            assert await text_of(client, "a") == before
            assert (await only_worker(client)).incarnation == worker.incarnation
        assert worker.log.count('"event": "ready"') == 1


@pytest.mark.asyncio
async def test_a_worker_that_restarts_is_taken_up_again(models: Models) -> None:
    """Kill -9 and a new process at the same address: the loss is told, then it serves again."""
    with own_port() as address:
        async with (
            running_worker(listen=f"tcp:{address}") as first,
            controller(models, address) as (_, client),
        ):
            before = await text_of(client, "a")
            os.kill(first.pid, signal.SIGKILL)
            await first.wait_ended()
            await until_state(client, "a", ModelState.FAILED)
            async with running_worker(listen=f"tcp:{address}") as second:
                assert await text_of(client, "a") == before
                assert (await only_worker(client)).incarnation == second.incarnation
                assert second.incarnation != first.incarnation
                assert (await phase_of(second))[0] == "a"


@pytest.mark.asyncio
async def test_a_worker_that_brings_its_model_is_taken_as_it_is(models: Models) -> None:
    """What the worker's own command line loaded is served without loading it again."""
    async with running_worker(
        "--model", f"{models.a}", "--name", "a", "--log-format", "json", listen="tcp:127.0.0.1:0"
    ) as worker:
        await worker.until(lambda own: own.state == types_pb2.MODEL_STATE_READY)
        async with controller(models, worker.address) as (_, client):
            await until_state(client, "a", ModelState.READY)
            await text_of(client, "a")
        assert worker.log.count('"event": "ready"') == 1


@pytest.mark.asyncio
async def test_a_load_waits_for_a_worker_that_is_not_there_yet(models: Models) -> None:
    """A controller may start first; its requests wait for the worker, within bounds."""
    with own_port() as address:
        async with controller(models, address) as (_, client):
            waiting = asyncio.create_task(text_of(client, "a"))
            await until_state(client, "a", ModelState.LOADING)
            async with running_worker(listen=f"tcp:{address}"):
                assert await asyncio.wait_for(waiting, LIMIT_S)


@pytest.mark.asyncio
async def test_two_workers_hold_two_models(models: Models) -> None:
    """Each model has a worker of its own, and a request for either evicts nobody."""
    async with (
        running_worker(listen="tcp:127.0.0.1:0") as one,
        running_worker() as two,  # a Unix socket is as good
        controller(models, one.address, two.address) as (_, client),
    ):
        await asyncio.gather(text_of(client, "a"), text_of(client, "b"))
        await asyncio.gather(text_of(client, "a"), text_of(client, "b"))
        held = {(await phase_of(worker))[0] for worker in (one, two)}
        status = await client.status()

    assert held == {"a", "b"}
    assert len(status.workers) == 2


@pytest.mark.asyncio
async def test_workers_of_two_machines_are_two_devices(models: Models) -> None:
    """Each machine has its memory and its place; what was on one is loaded on the other."""
    async with (
        running_worker("--machine", "one", listen="tcp:127.0.0.1:0") as one,
        running_worker("--machine", "two", listen="tcp:127.0.0.1:0") as two,
        controller(models, one.address, two.address) as (_, client),
    ):
        before = await text_of(client, "a")
        status = await client.status()
        assert [(d.machine, d.models_max) for d in status.devices] == [("one", 1), ("two", 1)]
        assert [machine.machine for machine in status.machines] == ["one", "two"]
        assert min(machine.total_nbytes for machine in status.machines) > 0
        holder, other = (one, two) if (await phase_of(one))[0] == "a" else (two, one)
        assert (await phase_of(holder))[0] == "a"

        os.kill(holder.pid, signal.SIGKILL)
        await holder.wait_ended()
        await until_state(client, "a", ModelState.FAILED)
        assert await text_of(client, "a") == before
        assert (await phase_of(other))[0] == "a"


@pytest.mark.asyncio
async def test_a_stream_that_loses_its_worker_is_told_so(models: Models, tmp_path: Path) -> None:
    """The client gets an error, and the next request is served by the next process."""
    models.a = write_tiny_model(tmp_path / "long", context_max=CONTEXT)
    with own_port() as address:
        async with (
            running_worker(listen=f"tcp:{address}") as first,
            controller(models, address) as (_, client),
        ):
            stream = client.generate(
                "ab", model="a", sampling=GREEDY, ignore_eos=True, migrate=False
            )
            async with stream as events:
                await anext(aiter(events))
                os.kill(first.pid, signal.SIGKILL)
                with pytest.raises(MlxdError):
                    async for _ in events:
                        pass
            await first.wait_ended()
            await until_state(client, "a", ModelState.FAILED)
            async with running_worker(listen=f"tcp:{address}"):
                assert await text_of(client, "a")


@pytest.mark.asyncio
async def test_workers_are_reached_over_tls_with_a_token(models: Models, tmp_path: Path) -> None:
    """The files that protect a worker let its controller in, and nobody without them."""
    authority = Authority(tmp_path)
    pair, token = authority.issue("worker"), token_file(tmp_path)
    files = ("--tls-cert", f"{pair.cert}", "--tls-key", f"{pair.key}", "--token-file", f"{token}")
    reach = ("--worker-tls-ca", f"{authority.path}", "--worker-token-file", f"{token}")
    async with running_worker(*files, listen="tcp:127.0.0.1:0") as worker:
        async with controller(models, worker.address, options=reach) as (_, client):
            assert await text_of(client, "a")
        async with controller(
            models, worker.address, options=("--worker-tls-ca", f"{authority.path}"), wait_s=3
        ) as (server, client):
            with pytest.raises(WorkerTimedOut):
                await text_of(client, "a")
            assert "UNAUTHENTICATED" in server.log_path.read_text(encoding="utf-8")
