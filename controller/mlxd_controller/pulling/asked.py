"""Downloads that are followed by questions, for an asker who may be gone without a word.

Invariants:
- A download runs while somebody asks about it, at least every PULL_UNASKED_MAX_S, and none outlives
  `aclose`.
- It is answered with no other model than the one that was asked for: each file has the hash, and
  all of them have the digest, that the asker knows. A download is given up as soon as the hub
  announces a file with another hash.
- A hub that does not answer is not asked again for a while: each load would wait for it.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

from mlxd_controller.pulling.downloads import Downloads, Fetch
from mlxd_controller.pulling.hub import hash_like
from mlxd_controller.pulling.wanted import Wanted, wanted_of, what_forbids
from mlxd_controller.runtime.hearing import hear
from mlxd_controller.runtime.ports import HubOrigin
from mlxd_shared import config
from mlxd_shared.domain.errors import (
    ExtraMissing,
    HubUnavailable,
    InvalidModel,
    InvalidRequest,
    PullFailed,
    PullInterrupted,
)
from mlxd_shared.domain.pulls import PulledModel, PullPhase, PullProgress


class AskedDownloads:
    """Owns them. For one event loop; leave it with `aclose`."""

    def __init__(
        self,
        cache_of: Callable[[], Path | None],
        fetch: Fetch,
        *,
        environment: Mapping[str, str],
        word_s: float = config.FLEET_HUB_WORD_S,
        away_s: float = config.FLEET_HUB_AWAY_S,
        unasked_s: float = config.PULL_UNASKED_MAX_S,
    ) -> None:
        """Ask nobody yet.

        cache_of: returns the hub's cache to fill; None: there is none. environment: may forbid
        access to a hub. word_s: how long a hub may take to list a model's files. away_s: how long
        one that does not answer is left alone. unasked_s: how long a download goes on by itself.
        """
        self._cache_of = cache_of
        self._fetch = fetch
        self._environment = environment
        self._word_s, self._away_s, self._unasked_s = word_s, away_s, unasked_s
        self._downloads: Downloads | None = None
        self._followed: dict[str, _Followed] = {}
        self._away: HubUnavailable | ExtraMissing | None = None
        self._away_until_s = -math.inf

    async def ask(self, digest: str, origin: HubOrigin) -> PullProgress:
        """Return how far the download of a model is, which is begun if it does not run.

        An answer comes at its end, or after FLEET_REPORT_INTERVAL_S. In the last one, `pulled` says
        where the model is.

        Raises:
            HubUnavailable: the hub does not answer, did not a while ago, or may not be asked.
            InvalidModel: the hub has other files under this commit, or they are another model.
            InvalidRequest: there is no cache, or the origin is none that a hub could have.
            PullInterrupted: it was cut off; the next question goes on with it.
            MlxdError: see `pulling.process.fetch`.
        """
        followed = self._followed.get(digest)
        if followed is None:
            followed = self._followed[digest] = self._begin(digest, origin)
        followed.hear()
        try:
            await asyncio.wait({followed.task}, timeout=config.FLEET_REPORT_INTERVAL_S)
        finally:
            loop = asyncio.get_running_loop()
            followed.hear()
            followed.patience = loop.call_later(self._unasked_s, self._drop, digest, followed)
        if not followed.task.done():
            return followed.latest
        self._drop(digest, followed)
        if followed.task.cancelled():
            raise PullInterrupted("the download was given up meanwhile")
        return followed.task.result()

    async def leave(self, digest: str) -> None:
        """End a download; what has arrived stays. Nothing happens where none runs."""
        if (followed := self._followed.get(digest)) is not None:
            self._drop(digest, followed)

    async def aclose(self) -> None:
        """End all downloads, and wait until each has ended."""
        tasks = [followed.task for followed in self._followed.values()]
        for digest, followed in tuple(self._followed.items()):
            self._drop(digest, followed)
        if tasks:
            await asyncio.wait(tasks)
        if self._downloads is not None:
            await self._downloads.aclose()

    def _begin(self, digest: str, origin: HubOrigin) -> _Followed:
        if variable := what_forbids(self._environment):
            raise HubUnavailable(f"{variable} forbids access to the hub")
        if self._away is not None and asyncio.get_running_loop().time() < self._away_until_s:
            raise replace(self._away)
        cache = self._cache_of()
        if cache is None:
            raise InvalidRequest.of("model", "this machine uses no cache of a hub")
        wanted = wanted_of(f"{origin.repository}@{origin.commit}", (), cache)
        if self._downloads is None or self._downloads.cache != cache:
            self._downloads = Downloads(cache, self._fetch)
        followed = _Followed()
        running = self._run(followed, self._downloads, wanted, digest, dict(origin.contents))
        followed.task = asyncio.create_task(running)
        return followed

    async def _run(
        self,
        followed: _Followed,
        downloads: Downloads,
        wanted: Wanted,
        digest: str,
        contents: Mapping[str, str],
    ) -> PullProgress:
        try:
            last = await _follow_to_end(followed, downloads, wanted, contents, word_s=self._word_s)
        except (HubUnavailable, ExtraMissing) as error:
            self._away = replace(error)
            self._away_until_s = asyncio.get_running_loop().time() + self._away_s
            raise
        self._away = None
        pulled = last.pulled
        assert pulled is not None
        if pulled.digest != digest:
            other = pulled.digest or "of no model"
            raise InvalidModel(f"the digest of what the hub has is {other}, not {digest}")
        await asyncio.to_thread(_check_contents, pulled, contents)
        return last

    def _drop(self, digest: str, followed: _Followed) -> None:
        """End a download, unless it has ended; a later one of the model is another."""
        if self._followed.get(digest) is followed:
            del self._followed[digest]
        followed.hear()
        followed.task.cancel()
        followed.task.add_done_callback(_retrieve)


class _Followed:
    """One download, and when it ends by itself."""

    task: asyncio.Task[PullProgress]

    def __init__(self) -> None:
        self.latest = PullProgress(PullPhase.LISTING)
        self.patience: asyncio.TimerHandle | None = None

    def hear(self) -> None:
        """Note that somebody asks, or that nobody has to."""
        if self.patience is not None:
            self.patience.cancel()


async def _follow_to_end(
    followed: _Followed,
    downloads: Downloads,
    wanted: Wanted,
    contents: Mapping[str, str],
    *,
    word_s: float,
) -> PullProgress:
    """Note each step of a download; return the last one, which nobody is told yet."""
    async with aclosing(downloads.follow(wanted)) as steps:
        while True:
            is_listing = followed.latest.phase is PullPhase.LISTING
            try:
                step = await hear(anext(steps), limit_s=word_s if is_listing else math.inf)
            except TimeoutError:
                raise HubUnavailable(f"no answer from the hub for {word_s:.0f} s") from None
            _check_announced(step, contents)
            if step.pulled is not None:
                return step
            followed.latest = step


def _retrieve(task: asyncio.Task[PullProgress]) -> None:
    """Have asyncio know that nobody waits for an error any more."""
    if not task.cancelled():
        task.exception()


def _check_announced(step: PullProgress, contents: Mapping[str, str]) -> None:
    expected, announced = contents.get(step.file, ""), step.file_digest.partition(":")[2]
    if len(announced) == len(expected) and announced != expected:
        raise InvalidModel(f"the hub has it with the hash {announced}, not {expected}", step.file)


def _check_contents(pulled: PulledModel, contents: Mapping[str, str]) -> None:
    """Compare what is here with what each file should be; a link's name was proved as it came.

    Raises:
        InvalidModel: names the first that differs. PullFailed: one cannot be read.
    """
    for name, expected in contents.items():
        path = Path(pulled.path, name)
        try:
            if not path.exists() or (path.is_symlink() and path.readlink().name == expected):
                continue
            with path.open("rb") as stream:
                here = hash_like(expected, stream)
        except OSError as error:
            raise PullFailed(f"{path}: {error.strerror or error}") from error
        if here != expected:
            raise InvalidModel(f"the hub's has the hash {here}, not {expected}", name)
