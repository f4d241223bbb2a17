"""Attached workers by machine: its device, its places, its loss; what they hold at the start."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from mlxd.v1 import types_pb2
from mlxd_controller.core.state import State
from mlxd_controller.crew import AttachedProbe, Crew, take_held
from mlxd_controller.launcher.attached import AttachedLauncher
from mlxd_controller.launcher.process import END_UNKNOWN
from mlxd_controller.launcher.station import LOST_AFTER_S
from mlxd_controller.runtime.adoption import enrol
from mlxd_controller.runtime.ports import Ports
from mlxd_controller.settings import Limits
from mlxd_shared.domain.errors import WorkerStartFailed, WorkerTimedOut
from mlxd_shared.domain.figures import WorkerFigures
from mlxd_shared.domain.requests import LoadSpec, Weights
from tests.fakes.store import FakeStore
from tests.fakes.world import FakeClock
from tests.support.attached_workers import TIMEOUT_S, Scripted, attach_launcher
from tests.support.model_facts import facts
from tests.support.turns import turn_until


def probe_of(launcher: AttachedLauncher) -> AttachedProbe:
    """What tells the scheduler of their memory."""
    return AttachedProbe(Limits(reserve_bytes=0), launcher.machines)


def hear_all(launcher: AttachedLauncher) -> list[WorkerFigures]:
    """What the workers say of themselves, each that is not silent."""
    return [station.figures for station in launcher.stations if station.figures is not None]


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
        assert [d.workers for d in devices] == [("w0", "w1"), ("w2",), ("w3",)]
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
async def test_a_load_frees_what_workers_beside_it_hold_for_nobody() -> None:
    """Its plan took that for free. What is in use stays, and so does what another machine holds."""
    user, holder, empty = (Scripted(name, on="a") for name in ("user", "holder", "empty"))
    there = Scripted("there", on="b")
    user.say(model="used")
    there.say(model="x")
    async with attach_launcher(user, holder, empty, there) as launcher:
        await launcher.launch(model="used", incarnation="", device="cpu")
        holder.say(model="x")
        await turn_until(
            lambda: [w.model_name for w in hear_all(launcher)] == ["used", "x", "", "x"]
        )
        process = await launcher.launch(model="m", incarnation="", device="cpu")

        assert process.incarnation == "empty"
        assert [w.unloads for w in (user, holder, empty, there)] == [[], ["holder"], [], []]
        again = await launcher.launch(model="n", incarnation="", device="cpu")
        assert again.incarnation == "holder"


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
async def test_what_a_worker_said_that_is_gone_says_nothing_of_the_machine() -> None:
    """The least that those say who speak; of one that was short before it went, no more."""
    gone, left = Scripted("1", on="a"), Scripted("2", on="a")
    gone.host.available_bytes = 500
    async with attach_launcher(gone, left) as launcher:
        probe = probe_of(launcher)
        (before,) = probe.read(())
        process = await launcher.launch(model="m", incarnation="", device="cpu")
        gone.fall_silent()
        await asyncio.wait_for(process.wait_exited(), TIMEOUT_S)
        (after,) = probe.read(())

    assert (before.usable_bytes, after.usable_bytes) == (700, 5_100)


@pytest.mark.asyncio
async def test_a_silent_worker_that_counts_as_there_is_waited_for_a_moment() -> None:
    """Whether anybody uses it or not, because models are placed there meanwhile."""
    async with attach_launcher(Scripted("i"), silence_s_max=9.0) as launcher:
        (station,) = launcher.stations
        assert station.patience_s == 9.0
        station.status = None
        assert station.patience_s == LOST_AFTER_S
        station.present = False
        assert station.patience_s == 9.0


@pytest.mark.asyncio
async def test_news_of_other_machines_do_not_prolong_the_wait_for_one() -> None:
    """A load waits its moment for the workers of its machine, however much others have to say."""
    gone, other = Scripted("gone", on="a"), Scripted("other", on="b")

    async def chatter() -> None:
        while True:
            other.say()
            await asyncio.sleep(0)

    async with attach_launcher(gone, other, gone_wait_s=0.5) as launcher:
        assert [one.name for one in probe_of(launcher).read(())] == ["cpu", "b/cpu"]
        process = await launcher.launch(model="m", incarnation="", device="cpu")
        gone.fall_silent()
        await asyncio.wait_for(process.wait_exited(), TIMEOUT_S)
        chatting = asyncio.create_task(chatter())
        waiting = launcher.launch(model="m", incarnation="", device="cpu")
        with pytest.raises(WorkerTimedOut):
            await asyncio.wait_for(waiting, TIMEOUT_S)
        chatting.cancel()


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
