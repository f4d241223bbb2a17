"""What every launcher and every worker process must do: fake, scripted and real alike."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from mlxd_controller.launcher.attached import AttachedLauncher
from mlxd_controller.runtime.ports import Launcher
from mlxd_shared.domain.errors import WorkerExited
from tests.fakes.workers import FakeLauncher
from tests.support.launching import START_S_MAX, fake_command, launcher_of
from tests.support.worker_process import running_worker

KINDS = ("fake", "scripted process", "worker", "attached")


@asynccontextmanager
async def launcher_under_test(kind: str) -> AsyncIterator[Launcher]:
    """Yield a launcher whose workers listen."""
    if kind == "fake":
        yield FakeLauncher()
    elif kind == "scripted process":
        async with launcher_of(fake_command("serve")) as launcher:
            yield launcher
    elif kind == "attached":
        async with attached_to("i-1", "i-2") as launcher:
            yield launcher
    else:
        async with launcher_of() as launcher:
            yield launcher


@asynccontextmanager
async def attached_to(*incarnations: str) -> AsyncIterator[Launcher]:
    """Yield a launcher over workers that run already, and go on running afterwards."""
    async with AsyncExitStack() as stack:
        workers = [
            await stack.enter_async_context(running_worker("--incarnation", incarnation))
            for incarnation in incarnations
        ]
        launcher = AttachedLauncher([(w.incarnation, w.address) for w in workers])
        watching = asyncio.create_task(launcher.run())
        try:
            await launcher.wait_for_figures(wait_s=START_S_MAX)
            yield launcher
        finally:
            watching.cancel()
            await asyncio.wait([watching])
            assert [worker.process.returncode for worker in workers] == [None] * len(workers)


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", KINDS)
async def test_a_launched_worker_listens_under_its_incarnation(kind: str) -> None:
    """It lives, has an address and a pid, and is who it was told to be; two differ in all."""
    async with launcher_under_test(kind) as launcher:
        first = await launcher.launch(model="m", incarnation="i-1")
        second = await launcher.launch(model="m", incarnation="i-2")
        try:
            assert (first.incarnation, second.incarnation) == ("i-1", "i-2")
            assert first.exit_code is None
            assert first.pid > 0
            assert first.pid != second.pid
            assert first.address != second.address
        finally:
            await first.close()
            await second.close()


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", KINDS)
async def test_the_end_is_seen_by_every_waiter_and_close_is_idempotent(kind: str) -> None:
    """Waiters before and after, and any number of closes at once: one end, one exit code."""
    async with launcher_under_test(kind) as launcher:
        process = await launcher.launch(model="m", incarnation="i-1")
        before = asyncio.create_task(process.wait_exited())

        codes = list(await asyncio.gather(*(process.close() for _ in range(3))))
        codes += [await before, await process.wait_exited(), await process.close()]

        assert len(set(codes)) == 1
        assert process.exit_code == codes[0]
        assert isinstance(process.last_lines(), tuple)
        assert not await process.output.wait(process.output.end)


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", KINDS)
async def test_a_waiter_that_is_cancelled_takes_nobodys_end_away(kind: str) -> None:
    """Cancelling one who waits for the end, or closes, changes nothing for the others."""
    async with launcher_under_test(kind) as launcher:
        process = await launcher.launch(model="m", incarnation="i-1")
        waiting = [asyncio.create_task(process.wait_exited()) for _ in range(2)]
        closing = asyncio.create_task(process.close())
        await asyncio.sleep(0)
        waiting[0].cancel()
        closing.cancel()

        assert await waiting[1] == await process.close()


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", ["fake", "scripted process"])
async def test_a_worker_that_ends_before_it_listens_is_an_exit(kind: str) -> None:
    """The failure carries the code and the last lines."""
    if kind == "fake":
        fake = FakeLauncher()
        fake.failure = WorkerExited("m", ("one", "two", "three"), 3)
        launcher: Launcher = fake
        with pytest.raises(WorkerExited) as caught:
            await launcher.launch(model="m", incarnation="i-1")
    else:
        async with launcher_of(fake_command("exit")) as real:
            with pytest.raises(WorkerExited) as caught:
                await real.launch(model="m", incarnation="i-1")
    assert caught.value.code == 3
    assert sorted(caught.value.last_lines) == ["one", "three", "two"]
