"""Downloads that calls share, wait for and leave, over a scripted `fetch`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path

import pytest

from mlxd_controller.pulling.downloads import Downloads, Report
from mlxd_controller.pulling.wanted import Wanted
from mlxd_shared import config
from mlxd_shared.domain.errors import HubDenied, QueueFull, ShuttingDown
from mlxd_shared.domain.pulls import PulledModel, PullPhase, PullProgress

CACHE = Path("/cache")
MAIN = Wanted("o/m", "main", CACHE)
STEP = PullProgress(PullPhase.DOWNLOADING, "a", file_done_nbytes=1, file_size_nbytes=2)


class Scripted:
    """A `fetch` whose downloads go on when the test says so."""

    def __init__(self) -> None:
        self.begun: list[Wanted] = []
        self.running: list[Wanted] = []
        self.reports: list[Report] = []
        self.stopping = asyncio.Event()
        """A cancelled download ends once this is set."""
        self.stopping.set()
        self.results: list[asyncio.Future[PulledModel]] = []

    async def __call__(self, wanted: Wanted, report: Report) -> PulledModel:
        self.begun.append(wanted)
        self.running.append(wanted)
        self.reports.append(report)
        result: asyncio.Future[PulledModel] = asyncio.get_running_loop().create_future()
        self.results.append(result)
        report(PullProgress(PullPhase.LISTING))
        try:
            return await result
        finally:
            await self.stopping.wait()
            self.running.remove(wanted)


def result_of(wanted: Wanted = MAIN) -> PulledModel:
    """Return what a download has brought."""
    return PulledModel(wanted.name, "o/m", "main", "c", "/cache/x", "d", files=1, nbytes=2)


async def phases_of(steps: AsyncGenerator[PullProgress, None]) -> list[PullPhase]:
    """Return the phases of a whole download."""
    return [step.phase async for step in steps]


@pytest.mark.asyncio
async def test_two_calls_share_one_download() -> None:
    """Both see its progress, the later one from where it is; both are given the result."""
    fetch = Scripted()
    downloads = Downloads(CACHE, fetch)
    first, second = downloads.follow(MAIN), downloads.follow(MAIN)
    assert (await anext(first)).phase is PullPhase.LISTING
    fetch.reports[0](STEP)
    assert await anext(second) == STEP
    assert await anext(first) == STEP
    fetch.results[0].set_result(result_of())
    for steps in (first, second):
        assert [step.pulled async for step in steps] == [result_of()]
    assert fetch.begun == [MAIN]


@pytest.mark.asyncio
async def test_a_download_ends_with_the_last_call_that_follows() -> None:
    """Not with one of two; and a call that comes while it ends begins anew, once it has ended."""
    fetch = Scripted()
    downloads = Downloads(CACHE, fetch)
    first, second = downloads.follow(MAIN), downloads.follow(MAIN)
    await anext(first)
    await anext(second)
    await first.aclose()
    assert fetch.running == [MAIN]
    fetch.stopping.clear()
    await second.aclose()

    third = downloads.follow(MAIN)
    assert (await anext(third)).phase is PullPhase.WAITING
    assert len(fetch.begun) == 1
    fetch.stopping.set()
    assert (await anext(third)).phase is PullPhase.LISTING
    assert fetch.running == [MAIN]
    await third.aclose()
    await downloads.aclose()
    assert fetch.running == []


@pytest.mark.asyncio
async def test_one_repository_is_downloaded_by_one_at_a_time() -> None:
    """Another revision, and other files, wait; another repository does not."""
    fetch = Scripted()
    downloads = Downloads(CACHE, fetch)
    others = [Wanted("o/m", "v1", CACHE), Wanted("o/m", "main", CACHE, ("*.md",))]
    async with aclosing(downloads.follow(MAIN)) as first:
        await anext(first)
        later = [downloads.follow(other) for other in others]
        for steps in later:
            assert (await anext(steps)).phase is PullPhase.WAITING
        async with aclosing(downloads.follow(Wanted("o/n", "main", CACHE))) as apart:
            assert (await anext(apart)).phase is PullPhase.LISTING
        fetch.results[0].set_result(result_of())
        assert await phases_of(first) == [PullPhase.DONE]
    assert (await anext(later[0])).phase is PullPhase.LISTING
    assert fetch.running == [others[0]]
    await downloads.aclose()
    for steps in later:
        with pytest.raises(ShuttingDown):
            await phases_of(steps)


@pytest.mark.asyncio
async def test_a_failure_is_everybodys_and_the_next_call_tries_again() -> None:
    """With the error's own class; nothing of it is kept."""
    fetch = Scripted()
    downloads = Downloads(CACHE, fetch)
    calls = [downloads.follow(MAIN) for _ in range(2)]
    for steps in calls:
        await anext(steps)
    fetch.results[0].set_exception(HubDenied("gated"))
    for steps in calls:
        with pytest.raises(HubDenied):
            await anext(steps)
    async with aclosing(downloads.follow(MAIN)) as again:
        assert (await anext(again)).phase is PullPhase.LISTING


@pytest.mark.asyncio
async def test_a_slow_reader_misses_steps_but_no_files_last() -> None:
    """Of each file and phase the latest step is kept, in the order of their coming."""
    fetch = Scripted()
    downloads = Downloads(CACHE, fetch)
    async with aclosing(downloads.follow(MAIN)) as steps:
        await anext(steps)
        for name in ("a", "b"):
            for done in range(3):
                fetch.reports[0](
                    PullProgress(
                        PullPhase.DOWNLOADING, name, file_done_nbytes=done, file_size_nbytes=2
                    )
                )
        fetch.results[0].set_result(result_of())
        seen = [(step.file, step.file_done_nbytes) async for step in steps]
    assert seen == [("a", 2), ("b", 2), ("", 0)]


@pytest.mark.asyncio
async def test_what_is_kept_for_a_slow_reader_is_bounded() -> None:
    """The oldest steps go first; the result is always there."""
    fetch = Scripted()
    async with aclosing(Downloads(CACHE, fetch).follow(MAIN)) as steps:
        await anext(steps)
        for number in range(config.PULL_STEPS_KEPT_MAX + 5):
            fetch.reports[0](PullProgress(PullPhase.DOWNLOADING, f"{number}"))
        fetch.results[0].set_result(result_of())
        seen = [step async for step in steps]
    latest = range(5, config.PULL_STEPS_KEPT_MAX + 5)
    assert [step.file for step in seen[:-1]] == [f"{number}" for number in latest]
    assert seen[-1].pulled is not None


@pytest.mark.asyncio
async def test_downloads_and_calls_are_bounded() -> None:
    """Beyond either bound a call is refused with the bound, and what runs is not disturbed."""
    fetch = Scripted()
    downloads = Downloads(CACHE, fetch, pulls_max=1, calls_max=2)
    async with aclosing(downloads.follow(MAIN)) as first:
        await anext(first)
        with pytest.raises(QueueFull, match=r"downloads is full \(limit 1\)"):
            await anext(downloads.follow(Wanted("o/n", "main", CACHE)))
        async with aclosing(downloads.follow(MAIN)) as second:
            await anext(second)
            with pytest.raises(QueueFull, match=r"calls .* is full \(limit 2\)"):
                await anext(downloads.follow(MAIN))
        assert fetch.running == [MAIN]
    await downloads.aclose()
    assert fetch.running == []


@pytest.mark.asyncio
async def test_one_caller_has_not_all_downloads() -> None:
    """Beyond its own bound it is refused, and others are not; it may follow what others began, and
    begin another once one of its own has ended.
    """
    fetch = Scripted()
    downloads = Downloads(CACHE, fetch, pulls_max=3, pulls_a_caller_max=1)
    wanted = [Wanted(f"o/{number}", "main", CACHE) for number in range(3)]
    own = downloads.follow(wanted[0], caller="a")
    await anext(own)
    with pytest.raises(QueueFull, match=r"downloads of one key is full \(limit 1\)"):
        await anext(downloads.follow(wanted[1], caller="a"))
    async with aclosing(downloads.follow(wanted[1], caller="b")) as others:
        await anext(others)
        async with aclosing(downloads.follow(wanted[1], caller="a")) as shared:
            assert (await anext(shared)).phase is PullPhase.LISTING
    fetch.results[0].set_result(result_of(wanted[0]))
    assert await phases_of(own) == [PullPhase.DONE]
    async with aclosing(downloads.follow(wanted[2], caller="a")) as again:
        assert (await anext(again)).phase is PullPhase.LISTING
    await downloads.aclose()


@pytest.mark.asyncio
async def test_a_download_that_ends_at_once_is_told_whole() -> None:
    """However close its steps and its end are to each other."""

    async def fetch(wanted: Wanted, report: Report) -> PulledModel:
        report(STEP)
        return result_of(wanted)

    seen = [step async for step in Downloads(CACHE, fetch).follow(MAIN)]
    assert [step.phase for step in seen] == [PullPhase.DOWNLOADING, PullPhase.DONE]
