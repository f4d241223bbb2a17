"""Attached workers from the controller's side, against scripted workers on real sockets."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import typer

from mlxd.v1 import (
    status_pb2,
    status_pb2_grpc,
    types_pb2,
    worker_pb2,
    worker_pb2_grpc,
)
from mlxd_controller.cli.security import named_workers
from mlxd_controller.core.state import State
from mlxd_controller.crew import AttachedProbe, Crew, take_held
from mlxd_controller.launcher.attached import AttachedLauncher
from mlxd_controller.launcher.process import END_UNKNOWN
from mlxd_controller.runtime.adoption import enrol
from mlxd_controller.runtime.ports import Ports
from mlxd_controller.settings import Limits
from mlxd_shared.domain.devices import kind_of
from mlxd_shared.domain.errors import (
    InvalidModel,
    MlxdError,
    WorkerStartFailed,
    WorkerTimedOut,
    WrongWorker,
)
from mlxd_shared.domain.requests import LoadSpec, Weights
from mlxd_shared.security.net import parse_address
from mlxd_shared.security.secure_channel import PLAIN, ChannelSecurity
from mlxd_shared.serving.server import Health, listen, make_server
from tests.fakes.store import FakeStore
from tests.fakes.world import FakeClock
from tests.support.model_facts import facts

TIMEOUT_S = 60.0
ORDER = ("m", "/m", LoadSpec())


class Scripted(status_pb2_grpc.StatusServiceServicer, worker_pb2_grpc.WorkerServiceServicer):
    """A worker that says what a test wants, as soon as the test changes it."""

    def __init__(self, incarnation: str, *, on: str = "") -> None:
        self.worker = status_pb2.WorkerStatus(pid=7, incarnation=incarnation, backend="mlx-cpu")
        self.worker.memory.resident_bytes = 100
        self.worker.context_length, self.worker.rows_max = 512, 2
        self.host = status_pb2.HostMemory(
            machine=on, machine_id=on and f"id-{on}", total_bytes=10_000, available_bytes=5_000
        )
        self.unloads: list[str] = []
        self.loads = 0
        self.load_errors: list[MlxdError] = []
        self._silent = False
        self._changed = asyncio.Event()

    def say(self, *, incarnation: str = "", model: str = "", digest: str = "") -> None:
        """Change what is said, and say it at once."""
        self.worker.model_digest = digest
        self.worker.incarnation = incarnation or self.worker.incarnation
        self.worker.model_name = model
        self.worker.state = types_pb2.MODEL_STATE_READY if model else types_pb2.MODEL_STATE_UNLOADED
        self._changed.set()

    def fall_silent(self) -> None:
        """End the watch, and refuse any other."""
        self._silent = True
        self._changed.set()

    def speak_again(self) -> None:
        """Say again what was said before."""
        self._silent = False

    async def WatchStatus(  # noqa: N802
        self, request: status_pb2.WatchStatusRequest, context: object
    ) -> AsyncIterator[status_pb2.WatchStatusResponse]:
        """Say it, and again at each change."""
        while not self._silent:
            self._changed.clear()
            status = status_pb2.Status(workers=[self.worker], host_memory=self.host)
            yield status_pb2.WatchStatusResponse(status=status)
            await self._changed.wait()

    async def Load(  # noqa: N802
        self, request: worker_pb2.LoadRequest, context: object
    ) -> AsyncIterator[worker_pb2.LoadResponse]:
        """Fail as scripted, or be ready."""
        self.loads += 1
        if self.load_errors:
            raise self.load_errors.pop(0)
        yield worker_pb2.LoadResponse(progress=types_pb2.LoadProgress(stage="ready"))

    async def Unload(  # noqa: N802
        self, request: worker_pb2.UnloadRequest, context: object
    ) -> worker_pb2.UnloadResponse:
        """Note who was meant."""
        self.unloads.append(request.worker_incarnation)
        return worker_pb2.UnloadResponse()

    async def _refuse_call(self, request: object, context: object) -> worker_pb2.ShutdownResponse:
        raise AssertionError(request)

    GetStatus = Shrink = Drain = Shutdown = Adopt = _refuse_call  # type: ignore[assignment]


@asynccontextmanager
async def attach_launcher(
    *workers: Scripted, wait_s: float = TIMEOUT_S, restart_s: float = TIMEOUT_S
) -> AsyncIterator[AttachedLauncher]:
    """A launcher that has heard all these workers."""
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="mlxd-"))
        named = []
        for number, worker in enumerate(workers):
            server = make_server(Health(), ())
            status_pb2_grpc.add_StatusServiceServicer_to_server(worker, server)
            worker_pb2_grpc.add_WorkerServiceServicer_to_server(worker, server)
            target = listen(server, parse_address(f"unix:{folder}/{number}"))
            await server.start()
            stack.push_async_callback(server.stop, None)
            named.append((f"w{number}", target))
        launcher = AttachedLauncher(named, wait_s=wait_s, restart_s=restart_s)
        watching = asyncio.create_task(launcher.run())
        try:
            assert len(await launcher.wait_for_figures(wait_s=TIMEOUT_S)) == len(workers)
            yield launcher
        finally:
            watching.cancel()
            await asyncio.wait([watching])
            assert watching.cancelled()


@pytest.mark.asyncio
async def test_the_worker_that_holds_the_model_is_taken_first() -> None:
    """Then one that holds nothing, then any; each once."""
    other, empty, holder = Scripted("other"), Scripted("empty"), Scripted("holder")
    other.say(model="x")
    holder.say(model="m")
    async with attach_launcher(other, empty, holder) as launcher:
        taken = [await launcher.launch(model="m", incarnation="ignored") for _ in range(3)]

        assert [process.incarnation for process in taken] == ["holder", "empty", "other"]


@pytest.mark.asyncio
async def test_giving_back_unloads_and_frees() -> None:
    """The worker is told once, by its own incarnation, and may be taken again."""
    worker = Scripted("i")
    async with attach_launcher(worker) as launcher:
        process = await launcher.launch(model="m", incarnation="")
        waiting = asyncio.create_task(launcher.launch(model="n", incarnation=""))
        await asyncio.gather(process.close(), process.close())

        assert (process.exit_code, worker.unloads) == (0, ["i"])
        again = await asyncio.wait_for(waiting, TIMEOUT_S)
        assert again.incarnation == "i"


@pytest.mark.asyncio
async def test_a_controller_that_leaves_leaves_the_model() -> None:
    """Nothing is unloaded then, and the process still counts as given back."""
    worker = Scripted("i")
    async with attach_launcher(worker) as launcher:
        process = await launcher.launch(model="m", incarnation="")
        launcher.leave()

        assert (await process.close(), worker.unloads) == (0, [])


@pytest.mark.asyncio
async def test_another_incarnation_is_the_end_of_the_first() -> None:
    """Who used the former process is told, without a word to the new one, which is free."""
    worker = Scripted("first")
    async with attach_launcher(worker) as launcher:
        process = await launcher.launch(model="m", incarnation="")
        worker.say(incarnation="second")

        assert await asyncio.wait_for(process.wait_exited(), TIMEOUT_S) == END_UNKNOWN
        assert "started again" in process.last_lines()[0]
        assert await process.close() == END_UNKNOWN
        assert worker.unloads == []
        assert (await launcher.launch(model="m", incarnation="")).incarnation == "second"


@pytest.mark.asyncio
async def test_waiting_for_a_worker_has_a_bound_and_a_reason() -> None:
    """The error says of each worker why it was not taken."""
    async with attach_launcher(Scripted("i"), wait_s=0.05) as launcher:
        await launcher.launch(model="m", incarnation="")
        with pytest.raises(WorkerTimedOut) as caught:
            await launcher.launch(model="n", incarnation="")
    assert caught.value.last_lines == ("worker w0: in use",)

    nobody = AttachedLauncher([("gone", "127.0.0.1:1")], wait_s=2.0)
    watching = asyncio.create_task(nobody.run())
    with pytest.raises(WorkerTimedOut) as caught:
        await nobody.launch(model="m", incarnation="")
    assert caught.value.last_lines[0].startswith("worker gone: UNAVAILABLE")
    watching.cancel()
    await asyncio.wait([watching])


@pytest.mark.asyncio
@pytest.mark.parametrize("error", [WrongWorker("m", "i"), None])
async def test_a_load_takes_the_place_of_what_is_there(error: MlxdError | None) -> None:
    """What the worker holds otherwise is unloaded first; what it holds as ordered is not."""
    worker = Scripted("i")
    worker.load_errors = [error] if error else []
    async with attach_launcher(worker) as launcher:
        process = await launcher.launch(model="m", incarnation="")
        link = launcher.connect(address=process.address, incarnation="i", digest="d" * 64)
        stages = [step.stage async for step in link.load(*ORDER)]
        await link.close()

    assert stages == ["ready"]
    assert worker.unloads == (["i"] if error else [])


@pytest.mark.asyncio
async def test_a_load_that_fails_fails_once() -> None:
    """What is wrong with the model is no reason to unload anything."""
    worker = Scripted("i")
    worker.load_errors = [InvalidModel("no weights")]
    async with attach_launcher(worker) as launcher:
        process = await launcher.launch(model="m", incarnation="")
        link = launcher.connect(address=process.address, incarnation="i", digest="d" * 64)
        with pytest.raises(InvalidModel):
            async for _ in link.load(*ORDER):
                pass
        await link.close()

    assert (worker.loads, worker.unloads) == (1, [])


def probe_of(launcher: AttachedLauncher) -> AttachedProbe:
    """What tells the scheduler of their memory."""
    return AttachedProbe(Limits(reserve_bytes=0), launcher.machines)


@pytest.mark.asyncio
async def test_memory_is_what_the_workers_say() -> None:
    """The least total and free that was said, with what the workers hold counted as usable."""
    one, two = Scripted("1"), Scripted("2")
    two.host.available_bytes = 4_000
    async with attach_launcher(one, two) as launcher:
        (device,) = probe_of(launcher).read(())

    assert (device.name, device.kind, device.total_bytes) == ("cpu", "cpu", 10_000)
    assert (device.node, device.lost, device.models_max) == ("", False, 2)
    assert device.usable_bytes == 4_200


@pytest.mark.asyncio
async def test_each_machine_is_a_device_with_a_place_for_each_worker() -> None:
    """Its own memory, whoever else is attached; two of one name are told apart by their ids."""
    one, two, other, twin = (Scripted(str(index), on="a") for index in range(4))
    other.host.machine, other.host.machine_id = "b", "id-b"
    twin.host.machine_id = "id-twin"
    other.host.total_bytes = other.host.available_bytes = 20_000
    async with attach_launcher(one, two, other, twin) as launcher:
        probe = probe_of(launcher)
        devices = probe.read(())

        assert [(d.name, d.node, d.models_max) for d in devices] == [
            ("cpu", "a", 2),
            ("b/cpu", "b", 1),
            ("a-id-twin/cpu", "a-id-twin", 1),
        ]
        assert [(d.total_bytes, d.usable_bytes) for d in devices] == [
            (10_000, 5_200),
            (20_000, 20_000),
            (10_000, 5_100),
        ]
        assert probe.read(()) == devices
        assert [(m.machine, m.resident_nbytes, m.lost) for m in probe.machines()] == [
            (device.node, 100 * (device.models_max or 0), False) for device in devices
        ]


@pytest.mark.asyncio
async def test_a_load_takes_a_worker_of_its_machine() -> None:
    """Though another holds the model; where there is no such machine it fails at once."""
    here, there = Scripted("here", on="a"), Scripted("there", on="b")
    there.say(model="m")
    async with attach_launcher(here, there) as launcher:
        assert [one.name for one in probe_of(launcher).read(())] == ["cpu", "b/cpu"]
        process = await launcher.launch(model="m", incarnation="", device="cpu")
        assert process.incarnation == "here"
        with pytest.raises(WorkerStartFailed):
            await launcher.launch(model="m", incarnation="", device="c/cpu")
        waiting = asyncio.create_task(launcher.launch(model="n", incarnation="", device="cpu"))
        assert (await launcher.launch(model="n", incarnation="")).incarnation == "there"
        await process.close()
        assert (await asyncio.wait_for(waiting, TIMEOUT_S)).incarnation == "here"


@pytest.mark.asyncio
async def test_a_worker_that_falls_silent_takes_its_place_along() -> None:
    """It has ended for its user; its machine is not lost, so that models wait for its restart."""
    worker = Scripted("i", on="a")
    async with attach_launcher(worker) as launcher:
        probe = probe_of(launcher)
        (before,) = probe.read(())
        process = await launcher.launch(model="m", incarnation="", device="cpu")
        worker.fall_silent()

        assert await asyncio.wait_for(process.wait_exited(), TIMEOUT_S) == END_UNKNOWN
        (silent,) = probe.read(())
        assert (silent.lost, silent.models_max, silent.budget_bytes) == (
            False,
            0,
            before.budget_bytes,
        )

        worker.speak_again()
        again = launcher.launch(model="m", incarnation="", device="cpu")
        assert (await asyncio.wait_for(again, TIMEOUT_S)).incarnation == "i"
        assert probe.read(()) == (before,)


@pytest.mark.asyncio
async def test_a_machine_is_lost_with_its_last_worker() -> None:
    """Loads that wait for it fail, and its figures are the last; others are as they were."""
    gone, other = Scripted("gone", on="a"), Scripted("other", on="b")
    async with attach_launcher(gone, other, restart_s=0.0) as launcher:
        probe = probe_of(launcher)
        before = probe.read(())
        await launcher.launch(model="m", incarnation="", device="cpu")
        waiting = asyncio.create_task(launcher.launch(model="n", incarnation="", device="cpu"))
        gone.fall_silent()

        with pytest.raises(WorkerStartFailed) as caught:
            await asyncio.wait_for(waiting, TIMEOUT_S)
        assert caught.value.last_lines[0].startswith("worker w0: ")
        lost, present = probe.read(())
        assert (lost.lost, lost.budget_bytes) == (True, before[0].budget_bytes)
        assert present == before[1]
        assert [memory.lost for memory in probe.machines()] == [True, False]


@pytest.mark.asyncio
async def test_what_workers_hold_at_the_start_is_taken_over_where_it_is() -> None:
    """One worker a model, on its machine, under the options that it names; the others are free."""
    workers = [Scripted(name, on=on) for name, on in ("xa", "hb", "db", "fb")]
    unknown, held, double, later = workers
    unknown.say(model="x")
    for scripted in (held, double):
        scripted.worker.weights = types_pb2.WEIGHTS_FORMAT_FLOAT32
        scripted.say(model="m", digest="d")
    later.say(model="n", digest="e")
    later.worker.weights = 99  # type: ignore[assignment]
    store = FakeStore({"m": ("d", facts(10)), "n": ("e", facts(10))})
    async with attach_launcher(*workers) as launcher:
        ports = Ports(launcher, launcher.connect, probe_of(launcher), FakeClock())
        crew = Crew(ports, None, launcher)
        (survivor,) = await take_held(crew, store)

        state = State(devices=ports.probe.read(()))
        ((worker, event),) = enrol([survivor], state, ports.clock, local=False)
        assert (event.digest, event.device, event.choice.context_length) == ("d", "b/cpu", 512)
        assert event.spec == LoadSpec(
            context_length=512, rows_max=2, weights=Weights.FLOAT32, prefix_cache_nbytes=0
        )
        assert (worker.incarnation, worker.local, worker.plan.device) == ("h", False, "b/cpu")
        free = {(await launcher.launch(model="", incarnation="")).incarnation for _ in range(3)}
        assert free == {"x", "d", "f"}
        await survivor.link.close()


@pytest.mark.asyncio
async def test_what_waits_for_the_stand_in_is_told_of_the_machine() -> None:
    """This one stands for theirs until it is known; where that is called otherwise, it is lost."""
    worker = Scripted("i", on="a")
    worker.worker.backend = "mlx-cuda-13"
    async with attach_launcher(worker) as launcher:
        probe = probe_of(launcher)
        last, launcher.stations[0].last = launcher.stations[0].last, None
        (stand_in,) = probe.read(())
        assert (stand_in.name, stand_in.lost, stand_in.models_max) == ("cpu", False, 1)
        assert stand_in.budget_bytes > 0
        assert probe.machines() == ()
        assert launcher.machines.may_serve("cpu")
        launcher.stations[0].last = last

        machine, gone = probe.read(())
        assert (machine.name, machine.lost, gone) == ("gpu0", False, replace(stand_in, lost=True))
        assert not launcher.machines.may_serve("cpu")
        assert probe.read(()) == (machine,)


def test_the_backend_tells_the_kind_of_device() -> None:
    """As the worker names its distribution."""
    assert [kind_of(name) for name in ("mlx-cpu", "mlx-cuda-13", "mlx")] == ["cpu", "cuda", "metal"]


def test_workers_are_named_on_the_command_line() -> None:
    """Each NAME=ADDRESS once; nothing about workers without one."""
    assert named_workers(["a=tcp:h:1", "b=unix:/s"], PLAIN) == (("a", "h:1"), ("b", "unix:/s"))
    assert named_workers(None, PLAIN) == ()
    for bad in (["h:1"], ["=h:1"], ["a=h"], ["a=h:1", "a=h:2"], ["a=h:1", "b=h:1"]):
        with pytest.raises(typer.Exit):
            named_workers(bad, PLAIN)
    with pytest.raises(typer.Exit):
        named_workers([], ChannelSecurity(token_file=Path("t")))
