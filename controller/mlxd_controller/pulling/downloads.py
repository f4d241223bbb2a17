"""The downloads of a controller: each once, however many ask for it, and none that nobody awaits.

Invariants:
- Calls for the same revision and files share one download. It ends when the last of them leaves.
- Two downloads of one repository never run at once: they would write the same files. The later one
  waits, also for one that is about to end.
- Who has begun a download is charged for it until it ends, whoever else follows it meanwhile; one
  caller may not have begun them all.
- A slow reader misses steps, but of the PULL_STEPS_KEPT_MAX files that came last none's last one,
  and never the end.
- When `Downloads` is left no process of it runs.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeAlias

from mlxd_controller.pulling.wanted import Wanted
from mlxd_shared import config
from mlxd_shared.domain.errors import QueueFull, ShuttingDown
from mlxd_shared.domain.pulls import PulledModel, PullPhase, PullProgress
from mlxd_shared.wire.admission import Room

Report: TypeAlias = Callable[[PullProgress], None]
Fetch: TypeAlias = Callable[[Wanted, Report], Awaitable[PulledModel]]
"""Downloads a model and reports each step; a cancelled one has stopped when it is done."""


class Downloads:
    """Owns them. For one event loop; leave it with `aclose`."""

    def __init__(
        self,
        cache: Path,
        fetch: Fetch,
        *,
        pulls_max: int = config.PULLS_MAX,
        pulls_a_caller_max: int = config.PULLS_A_CALLER_MAX,
        calls_max: int = config.PULL_CALLS_MAX,
    ) -> None:
        """Download into `cache` by `fetch`: at most `pulls_max` at once, for `calls_max` calls.

        pulls_a_caller_max: of those, that one caller may have begun.
        """
        self.cache = cache
        self._fetch = fetch
        self._pulls = Room("downloads", pulls_max)
        self._pulls_a_caller_max = pulls_a_caller_max
        self._by_caller: Counter[str] = Counter()
        self._calls = Room("calls that follow downloads", calls_max)
        self._shared: dict[Wanted, _Download] = {}
        """Those that a further call may share."""
        self._tasks: dict[asyncio.Task[PulledModel], Wanted] = {}
        """All that have not ended, in the order of their beginning."""

    async def follow(
        self, wanted: Wanted, *, caller: str = ""
    ) -> AsyncGenerator[PullProgress, None]:
        """Yield the steps of a download, which is begun if it does not run; the last is DONE.

        caller: what tells callers apart; empty where nothing does, which no bound of a caller's
        holds for.

        Raises:
            QueueFull: there are as many calls or downloads as there may be, of all or of `caller`.
            ShuttingDown: `aclose` was called meanwhile.
            MlxdError: the download failed.
        """
        self._calls.enter()
        try:
            download = self._shared.get(wanted) or self._begin(wanted, caller)
            watch = _Watch(download)
            download.watches.add(watch)
            try:
                while (step := await watch.next()) is not None:
                    yield step
            finally:
                download.watches.remove(watch)
                if not download.watches:
                    self._forget(download)
                    download.task.cancel()
        finally:
            self._calls.leave()

    async def aclose(self) -> None:
        """End every download, and wait until each has ended."""
        tasks = list(self._tasks)
        for task in tasks:
            if not task.cancelling():  # a second time would cut its end short
                task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def _begin(self, wanted: Wanted, caller: str) -> _Download:
        if caller and self._by_caller[caller] >= self._pulls_a_caller_max:
            raise QueueFull("downloads of one key", self._pulls_a_caller_max)
        self._pulls.enter()
        self._by_caller[caller] += 1
        earlier = [
            task for task, other in self._tasks.items() if other.repository == wanted.repository
        ]
        download = _Download(wanted, caller)
        download.task = asyncio.create_task(self._run(download, earlier))
        self._shared[wanted] = download
        self._tasks[download.task] = wanted
        download.task.add_done_callback(lambda task: self._end(download, task))
        return download

    async def _run(
        self, download: _Download, earlier: list[asyncio.Task[PulledModel]]
    ) -> PulledModel:
        if earlier:
            download.report(PullProgress(PullPhase.WAITING))
            await asyncio.wait(earlier)
        return await self._fetch(download.wanted, download.report)

    def _end(self, download: _Download, task: asyncio.Task[PulledModel]) -> None:
        del self._tasks[task]
        self._pulls.leave()
        self._by_caller[download.caller] -= 1
        if not self._by_caller[download.caller]:
            del self._by_caller[download.caller]
        self._forget(download)
        if not task.cancelled() and task.exception() is None:
            pulled = task.result()
            nbytes = pulled.nbytes
            download.report(
                PullProgress(PullPhase.DONE, done_nbytes=nbytes, total_nbytes=nbytes, pulled=pulled)
            )
        download.has_ended = True
        for watch in download.watches:
            watch.changed.set()

    def _forget(self, download: _Download) -> None:
        """Let no further call share a download; one for the same may have begun since."""
        if self._shared.get(download.wanted) is download:
            del self._shared[download.wanted]


class _Download:
    """One of them, and who follows it."""

    task: asyncio.Task[PulledModel]

    def __init__(self, wanted: Wanted, caller: str) -> None:
        self.wanted = wanted
        self.caller = caller
        """Who has begun it."""
        self.watches: set[_Watch] = set()
        self.latest: PullProgress | None = None
        self.has_ended = False
        """Whether its last step has been told; its task is done a moment earlier."""

    def report(self, step: PullProgress) -> None:
        """Tell a step to everybody who follows."""
        self.latest = step
        for watch in self.watches:
            watch.put(step)


class _Watch:
    """The steps that one call has not been told yet: the latest of each file and phase."""

    def __init__(self, download: _Download) -> None:
        """Begin with the latest step."""
        self._download = download
        self._steps: dict[tuple[PullPhase, str], PullProgress] = {}
        self.changed = asyncio.Event()
        if download.latest is not None:
            self.put(download.latest)

    def put(self, step: PullProgress) -> None:
        """Add a step in place of the one before it that was like it."""
        key = (step.phase, step.file)
        self._steps.pop(key, None)
        self._steps[key] = step
        if len(self._steps) > config.PULL_STEPS_KEPT_MAX:
            del self._steps[next(iter(self._steps))]
        self.changed.set()

    async def next(self) -> PullProgress | None:
        """Return the next step; None: that was the last one. Raises the download's error."""
        while not self._steps:
            if self._download.has_ended:
                if self._download.task.cancelled():
                    raise ShuttingDown
                self._download.task.result()
                return None
            self.changed.clear()
            await self.changed.wait()
        return self._steps.pop(next(iter(self._steps)))


@asynccontextmanager
async def downloads_into(cache: Path | None, fetch: Fetch) -> AsyncIterator[Downloads | None]:
    """Provide downloads into a cache around the body; None: there is no cache to fill."""
    if cache is None:
        yield None
        return
    downloads = Downloads(cache, fetch)
    try:
        yield downloads
    finally:
        await downloads.aclose()
