"""Keeps what is on disk of prompts within one budget, whoever wrote it. One owner: the controller.

Invariants:
- What a worker may keep, it was given here: it begins with what its folder has. The larger of the
  last share that was ordered and of the worker's own word counts as taken, until the worker has
  ended: one that is being stopped still writes. An order without an answer is repeated.
- A worker whose disk is full says that it may keep less than it was given. It then gives the rest
  back, for others, and is given more only after a while.
- Folders that a worker has, or one that is just loading, are never touched: only their own process
  removes files there, but for what `drop` and `verify` were asked for.
- Files are looked at on a thread; one round or `drop` at a time, and one folder is verified, also
  where whoever asked has left.
- Nothing is shared out by old accounts: where the disk cannot be looked at, the next round tries.
- Where there is a key, what is in the clear in folders of nobody's goes when it is seen. What is
  encrypted with another key stays, and makes room like all else: the key may come back.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial

from mlxd_controller.metrics.counters import Metrics
from mlxd_controller.prefixes.division import Division, Holder, Idle, divide
from mlxd_controller.prefixes.folders import (
    as_folder,
    in_the_clear,
    list_locked,
    names_of,
    with_disk,
)
from mlxd_controller.runtime.changes import Changes
from mlxd_controller.runtime.worker import Worker
from mlxd_controller.settings import DiskBudget
from mlxd_shared import config
from mlxd_shared.blocks.folder import FolderRefused
from mlxd_shared.blocks.root import Findings, FormFolder, RootFolder
from mlxd_shared.domain.errors import InvalidRequest, MlxdError, QueueFull
from mlxd_shared.domain.figures import PrefixDisk as PrefixDiskFigures
from mlxd_shared.domain.figures import WorkerFigures
from mlxd_shared.ops.logs import get_logger
from mlxd_shared.security.disk_key import read_disk_key

LOOK_AGAIN_ROUNDS = 60
"""Idle folders are looked at anew after so many rounds: others may remove what is in them."""

WORDS_MIN = 3
"""Of what a worker says after it has answered an order, so many words are waited for: the first may
have been on its way before, and any is up to `FRESH_S` old."""

FRESH_S = config.STATUS_POLL_S

LIMITED_ROUNDS = 60
"""A worker whose disk was full is given no more for so many rounds, and may then try again."""

_log = get_logger("prefix disk")


@dataclass(frozen=True, slots=True)
class Dropped:
    """What was removed."""

    blocks: int = 0
    nbytes: int = 0


class Keeper:
    """The budget's owner. Methods are for the event loop's thread."""

    def __init__(self, budget: DiskBudget, root: RootFolder) -> None:
        """Own `root`, until `close`."""
        self.budget = budget
        self._root = root
        self._turn = asyncio.Lock()
        self._checking = asyncio.Lock()
        self._idle: dict[str, FormFolder] = {}
        self._held: frozenset[str] = frozenset()
        self._said_locked = False
        self._rounds = 0
        self._ordered: dict[int, int] = {}
        """The last share that a worker was given, by its number."""
        self._unsure: set[int] = set()
        """Workers that have not answered the last order."""
        self._words: dict[int, tuple[WorkerFigures | None, int]] = {}
        """The last word of a worker, and how many there were since it answered the last order."""
        self._limited: dict[int, int] = {}
        """For how many rounds yet a worker is given no more: its disk was full."""
        self._seen: dict[int, PrefixDiskFigures] = {}
        """What workers said when they were looked at last."""

    def close(self) -> None:
        """Let another controller have the folder."""
        self._root.close()

    async def run(
        self,
        workers: Callable[[], Iterable[Worker]],
        metrics: Metrics,
        changes: Changes,
        *,
        poll_s: float = config.STATUS_POLL_S,
    ) -> None:
        """Share out every `poll_s`, and once a worker is ready, until cancelled."""
        while True:
            await self.share_out(workers(), metrics)
            try:
                async with asyncio.timeout(poll_s):
                    await self._wait_for_newcomers(workers, changes)
            except TimeoutError:
                continue
            except QueueFull:  # others follow all changes that can be followed
                await asyncio.sleep(poll_s)

    async def _wait_for_newcomers(
        self, workers: Callable[[], Iterable[Worker]], changes: Changes
    ) -> None:
        """Wait for a worker that no round has seen: its model may be unloaded in a moment."""
        with changes.subscribe() as news:
            while all(worker.number in self._seen for worker in with_disk(workers())):
                await news.next()

    async def share_out(self, workers: Iterable[Worker], metrics: Metrics) -> None:
        """Do one round."""
        async with self._turn:
            everybody = tuple(workers)
            living = with_disk(everybody)  # their word as of now, whatever they say meanwhile
            self._count(living, metrics)
            numbers = {worker.number for worker in everybody}
            self._ordered = {n: share for n, share in self._ordered.items() if n in numbers}
            self._unsure &= numbers
            self._words = {n: words for n, words in self._words.items() if n in numbers}
            self._limited = {n: left - 1 for n, left in self._limited.items() if left > 1}
            for worker, figures in living.items():
                if self._hears_of_full_disk(worker, figures):
                    await self._take_back(worker, figures)
            if await self._look(frozenset(figures.form for figures in living.values())):
                holders = [self._holder(worker, figures) for worker, figures in living.items()]
                others = self._count_others(with_disk(everybody, stopping=True))
                idle = [
                    Idle(folder.form, folder.nbytes, folder.least_worth)
                    for folder in self._idle.values()
                    if not folder.is_held and folder.nbytes
                ]
                division = divide(max(self.budget.nbytes - others, 0), holders, idle)
                await self._order(division, living)
            self._seen = {worker.number: figures for worker, figures in living.items()}

    def _count_others(self, leaving: Mapping[Worker, PrefixDiskFigures]) -> int:
        """Return what counts as taken, and cannot be had, of folders that processes have."""
        shares = {
            figures.form: self._ordered_before(worker, figures)
            for worker, figures in leaving.items()
        }
        return sum(
            max(folder.nbytes, shares.get(folder.form, 0))
            for folder in self._idle.values()
            if folder.is_held
        )

    def accounts(self, workers: Iterable[Worker]) -> list[FormFolder]:
        """Return what is there by forms, those of workers by their own word."""
        held = [as_folder(worker, own) for worker, own in with_disk(workers).items()]
        forms = {folder.form for folder in held}
        idle = [folder for form, folder in self._idle.items() if form not in forms]
        return sorted((*held, *idle), key=lambda folder: (folder.about.model, folder.form))

    async def drop(self, names: frozenset[str] | None, workers: Iterable[Worker]) -> Dropped:
        """Remove what is there of a model; workers' shares stay as they are.

        names: its names and digests; None: of all models.

        Raises:
            InvalidRequest: a process that cannot be told has some of it; the rest is removed.
            MlxdError: a worker did not do as it was told.
        """
        async with self._turn:
            dropped = Dropped()
            for worker, figures in with_disk(workers).items():
                if names is not None and worker.digest not in names and worker.name not in names:
                    continue
                before = self._ordered_before(worker, figures)
                share_nbytes = self._ordered.get(worker.number, figures.budget_nbytes)
                await self._give(worker, 0, before=before)
                await self._give(worker, share_nbytes, before=before)
                dropped = _plus(dropped, figures.blocks, figures.nbytes)
            looked = await self._look(self._held, again=True)
            left = [] if looked else [str(self.budget.folder)]
            try:
                for folder in list(self._idle.values()):
                    if names is not None and names.isdisjoint(names_of(folder)):
                        continue
                    gone = 0 if folder.is_held else await self._trim(folder, 0)
                    dropped = _plus(dropped, folder.blocks if gone else 0, gone)
                    if self._idle[folder.form].blocks:
                        left.append(folder.about.model or folder.form)
            finally:  # whoever asked may leave while files are removed
                self._rounds = 0
            if left:
                problem = f"a process has some of it, or the disk fails: {', '.join(left[:8])}"
                raise InvalidRequest.of("model", f"{problem}; try again later")
            return dropped

    async def verify(self) -> AsyncGenerator[Findings, None]:
        """Check every file, and yield what was found, folder by folder.

        Rounds go on meanwhile, and whoever does not read on holds nobody up.
        """
        for form in await asyncio.to_thread(self._root.forms):
            left = threading.Event()
            checking = asyncio.create_task(self._check(form, left))
            try:
                findings = await asyncio.shield(checking)
            finally:
                left.set()
            if findings.refused:
                reasons = {fault.value: count for fault, count in findings.refused.items()}
                _log.warning("removed damaged blocks", folder=form, **reasons)
            yield findings

    async def _check(self, form: str, left: threading.Event) -> Findings:
        """Check a folder when it is this one's turn, until whoever asked has left."""
        async with self._checking:
            return await asyncio.to_thread(self._root.verify, form, until=left.is_set)

    def _holder(self, worker: Worker, figures: PrefixDiskFigures) -> Holder:
        seen = self._seen.get(worker.number)
        return Holder(
            form=figures.form,
            nbytes=figures.nbytes,
            share_nbytes=self._ordered_before(worker, figures),
            least_worth=figures.least_worth if figures.blocks else float("inf"),
            block_nbytes=figures.block_nbytes,
            evicts=seen is not None and figures.evicted > seen.evicted,
            is_limited=worker.number in self._limited,
        )

    def _hears_of_full_disk(self, worker: Worker, figures: PrefixDiskFigures) -> bool:
        """Tell from a new word whether a worker's disk has no room for its whole share."""
        last, count = self._words.get(worker.number, (None, 0))
        own = worker.figures
        if own is None or own is last or (own.age_s or 0.0) > FRESH_S:
            return False
        self._words[worker.number] = (own, count + 1)
        share_nbytes = self._ordered.get(worker.number, 0)
        is_sure = count + 1 >= WORDS_MIN and worker.number not in self._unsure
        return is_sure and figures.budget_nbytes < share_nbytes

    async def _take_back(self, worker: Worker, figures: PrefixDiskFigures) -> None:
        """Let others have what a worker's disk has no room for, and give it no more for a while."""
        self._limited[worker.number] = LIMITED_ROUNDS
        before = self._ordered_before(worker, figures)
        await self._try_to_give(worker, figures.budget_nbytes, before=before)

    async def _look(self, held: frozenset[str], *, again: bool = False) -> bool:
        """Look at the folders that no worker has, where they may have changed.

        Return whether what is known of them is true.
        """
        self._rounds += 1
        is_due = again or held != self._held or self._rounds % LOOK_AGAIN_ROUNDS == 1
        # One that a process held then may be nobody's by now, or a worker's that says so soon.
        if not is_due and not any(folder.is_held for folder in self._idle.values()):
            return True
        try:
            forms = await asyncio.to_thread(self._root.forms)
            self._idle = {
                form: await asyncio.to_thread(self._root.survey, form)
                for form in forms
                if form not in held
            }
        except OSError as error:
            _log.warning("cannot look at what is on disk", reason=error.strerror)
            self._rounds = 0
            return False
        self._held = held
        self._say_locked()
        if self._root.key is not None:
            for folder in in_the_clear(self._idle.values()):
                _log.warning("removing blocks in the clear", folder=folder.form)
                await self._remove(folder, partial(self._root.remove_clear, folder.form))
        return True

    def _say_locked(self) -> None:
        """Say once that prompts are there that the key, or its absence, keeps from being read."""
        key = self._root.key
        folders = list_locked(self._idle.values(), "" if key is None else key.id.hex())
        if folders and not self._said_locked:
            self._said_locked = True
            nbytes = sum(folder.nbytes for folder in folders)
            _log.warning("blocks are locked by another key", folders=len(folders), nbytes=nbytes)

    async def _order(self, division: Division, living: Mapping[Worker, PrefixDiskFigures]) -> None:
        """Have the division come true."""
        for form, kept in division.keep.items():
            await self._trim(self._idle[form], kept)
        for worker, figures in living.items():
            before = self._ordered_before(worker, figures)
            share = division.shares.get(figures.form, before)
            if figures.form not in division.shares and worker.number not in self._unsure:
                continue
            await self._try_to_give(worker, share, before=before)

    async def _try_to_give(self, worker: Worker, nbytes: int, *, before: int) -> None:
        """Give a worker a share; where it does not take it, the next round tries again."""
        try:
            await self._give(worker, nbytes, before=before)
        except MlxdError as error:
            _log.warning(
                "worker took no share of the disk", model=worker.name, reason=error.describe()
            )

    async def _give(self, worker: Worker, nbytes: int, *, before: int) -> None:
        """Give a worker a share. One that does not answer may have taken it, or not."""
        assert worker.link is not None, "it has spoken"
        self._ordered[worker.number] = max(before, nbytes)
        self._unsure.add(worker.number)
        await worker.link.share_disk(nbytes, timeout_s=config.SHRINK_TIMEOUT_S)
        self._ordered[worker.number] = nbytes
        self._words[worker.number] = (worker.figures, 0)
        self._unsure.discard(worker.number)

    def _ordered_before(self, worker: Worker, figures: PrefixDiskFigures) -> int:
        return max(self._ordered.get(worker.number, 0), figures.budget_nbytes)

    async def _trim(self, folder: FormFolder, keep_nbytes: int) -> int:
        """Have an idle folder keep at most so much; return what went."""
        return await self._remove(folder, partial(self._root.trim, folder.form, keep_nbytes))

    async def _remove(self, folder: FormFolder, remove: Callable[[], int | None]) -> int:
        """Have some of an idle folder go, on a thread; return how many bytes went."""
        try:
            gone = await asyncio.to_thread(remove)
            self._idle[folder.form] = await asyncio.to_thread(self._root.survey, folder.form)
        except OSError as error:
            _log.warning("cannot make room on disk", folder=folder.form, reason=error.strerror)
            return 0
        if gone:
            _log.info("removed blocks", model=folder.about.model, nbytes=gone, folder=folder.form)
        return gone or 0

    def _count(self, living: Mapping[Worker, PrefixDiskFigures], metrics: Metrics) -> None:
        """Count what workers have done since they were looked at last."""
        for worker, now in living.items():
            seen = self._seen.get(worker.number, PrefixDiskFigures())
            for event, blocks in (
                ("written", now.written - seen.written),
                ("read", now.read - seen.read),
                ("evicted", now.evicted - seen.evicted),
                ("refused", now.refused - seen.refused),
            ):
                metrics.prefix_disk_blocks.add(max(blocks, 0), model=worker.name, event=event)
            for event, nbytes in (
                ("written", now.written_nbytes - seen.written_nbytes),
                ("read", now.read_nbytes - seen.read_nbytes),
            ):
                metrics.prefix_disk_bytes.add(max(nbytes, 0), model=worker.name, event=event)
            hit_tokens = max(now.hit_tokens - seen.hit_tokens, 0)
            metrics.prefix_disk_hit_tokens.add(hit_tokens, model=worker.name)


def open_keeper(budget: DiskBudget) -> Keeper:
    """Return the keeper of a folder, which is this controller's from now on.

    Raises:
        InvalidRequest: it cannot be had, or nothing can be encrypted; says why.
        BadCredentials: the key's file cannot be used.
    """
    key = None if budget.key_file is None else read_disk_key(budget.key_file)
    try:
        return Keeper(budget, RootFolder(budget.folder, key))
    except FolderRefused as refused:
        raise InvalidRequest.of("--prefix-disk-folder", str(refused)) from refused


def _plus(dropped: Dropped, blocks: int, nbytes: int) -> Dropped:
    return replace(dropped, blocks=dropped.blocks + blocks, nbytes=dropped.nbytes + nbytes)
