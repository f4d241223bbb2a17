"""Attached workers from the controller's side, against scripted workers on real sockets."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest
import typer

from mlxd_controller.cli.security import named_workers
from mlxd_controller.launcher.attached import AttachedLauncher
from mlxd_controller.launcher.process import END_UNKNOWN
from mlxd_shared.domain.devices import kind_of
from mlxd_shared.domain.errors import (
    InvalidModel,
    MlxdError,
    WorkerTimedOut,
    WrongWorker,
)
from mlxd_shared.domain.requests import LoadSpec
from mlxd_shared.security.secure_channel import PLAIN, ChannelSecurity
from tests.support.attached_workers import TIMEOUT_S, Scripted, attach_launcher

ORDER = ("m", "/m", LoadSpec())


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
        assert "restarted" in process.last_lines()[0]
        assert await process.close() == END_UNKNOWN
        assert worker.unloads == []
        assert (await launcher.launch(model="m", incarnation="")).incarnation == "second"


@pytest.mark.asyncio
async def test_a_worker_that_says_nothing_is_lost_when_a_new_watch_hears_nothing() -> None:
    """That gets a moment, not the whole silence once more, in which nobody would be told."""
    worker = Scripted("i")
    async with attach_launcher(worker, silence_s_max=3.0) as launcher:
        process = await launcher.launch(model="m", incarnation="")
        worker.fall_mute()

        assert await asyncio.wait_for(process.wait_exited(), TIMEOUT_S) == END_UNKNOWN
        said = re.search(r": it reported nothing for (\d+) s$", process.last_lines()[0])
        assert said is not None
        assert int(said[1]) >= 5  # from its last word, both silences together
        assert worker.watches == 2


@pytest.mark.asyncio
async def test_where_all_workers_have_gone_a_load_waits_a_moment() -> None:
    """For one to come back; then it says of each why not, however long other loads wait."""
    worker = Scripted("i")
    async with attach_launcher(worker, gone_wait_s=0.05) as launcher:
        process = await launcher.launch(model="m", incarnation="")
        worker.fall_silent()
        await asyncio.wait_for(process.wait_exited(), TIMEOUT_S)
        with pytest.raises(WorkerTimedOut) as caught:
            await launcher.launch(model="m", incarnation="")
    assert caught.value.describe().endswith("(worker w0: it is stopping)")


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
