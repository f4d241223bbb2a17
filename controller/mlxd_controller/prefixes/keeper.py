"""Keeps what is on disk of prompts within one budget, whoever wrote it. One owner: the controller.

Invariants:
- What a worker may keep, it was given here: it begins with what its folder has. A share that was
  ordered counts as taken until the worker's own word is that it has less.
- Folders that a worker has, or one that is just loading, are never touched: only their own process
  removes files there, but for what `drop` and `verify` were asked for.
- Files are looked at on a thread; one round or `drop` at a time, and one folder is verified.
- A disk that fails ends no round: what could not be read is looked at again in the next.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable
from dataclasses import dataclass, replace

from mlxd_controller.metrics.counters import Metrics
from mlxd_controller.prefixes.division import Division, Holder, Idle, divide
from mlxd_controller.runtime.worker import Worker
from mlxd_controller.settings import DiskBudget
from mlxd_shared import config
from mlxd_shared.blocks.about import About
from mlxd_shared.blocks.folder import FolderRefused
from mlxd_shared.blocks.root import Findings, FormFolder, RootFolder, open_root
from mlxd_shared.domain.errors import InvalidRequest, MlxdError
from mlxd_shared.domain.figures import PrefixDiskFigures
from mlxd_shared.ops.logs import get_logger

LOOK_AGAIN_ROUNDS = 60
"""Idle folders are looked at anew after so many rounds: others may remove what is in them."""

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
        self._rounds = 0
        self._ordered: dict[int, int] = {}
        """The last share that a worker was given, by its number."""
        self._seen: dict[int, PrefixDiskFigures] = {}
        """What workers said when they were looked at last."""

    def close(self) -> None:
        """Let another controller have the folder."""
        self._root.close()

    async def run(self, workers: Callable[[], Iterable[Worker]], metrics: Metrics) -> None:
        """Share out once a second, by what the workers say, until cancelled."""
        while True:
            await self.share_out(workers(), metrics)
            await asyncio.sleep(config.STATUS_POLL_S)

    async def share_out(self, workers: Iterable[Worker], metrics: Metrics) -> None:
        """Do one round."""
        async with self._turn:
            living = _with_disk(workers)
            self._count(living, metrics)
            await self._look(frozenset(_figures(worker).form for worker in living))
            holders = [self._holder(worker) for worker in living]
            # What another process holds counts, and cannot be had.
            others = sum(folder.nbytes for folder in self._idle.values() if folder.is_held)
            idle = [
                Idle(folder.form, folder.nbytes, folder.least_worth)
                for folder in self._idle.values()
                if not folder.is_held and folder.nbytes
            ]
            division = divide(max(self.budget.nbytes - others, 0), holders, idle)
            await self._order(division, living)
            self._seen = {worker.number: _figures(worker) for worker in living}
            self._ordered = {n: share for n, share in self._ordered.items() if n in self._seen}

    def accounts(self, workers: Iterable[Worker]) -> list[FormFolder]:
        """Return what is there by forms, those of workers by their own word."""
        held = [_as_folder(worker) for worker in _with_disk(workers)]
        forms = {folder.form for folder in held}
        idle = [folder for form, folder in self._idle.items() if form not in forms]
        return sorted((*held, *idle), key=lambda folder: (folder.about.model, folder.form))

    async def drop(self, digest: str, workers: Iterable[Worker]) -> Dropped:
        """Remove what is there of a model, "" of all; workers' shares stay as they are.

        Raises:
            MlxdError: a worker did not do as it was told.
        """
        async with self._turn:
            dropped = Dropped()
            living = [w for w in _with_disk(workers) if digest in ("", w.digest)]
            for worker in living:
                figures = _figures(worker)
                share_nbytes = self._ordered_before(worker, figures)
                await self._give(worker, 0)
                await self._give(worker, share_nbytes)
                dropped = _plus(dropped, figures.blocks, figures.nbytes)
            await self._look(self._held, again=True)
            for folder in list(self._idle.values()):
                if digest in ("", folder.about.digest) and not folder.is_held:
                    gone = await self._trim(folder, 0)
                    dropped = _plus(dropped, folder.blocks if gone else 0, gone)
            return dropped

    async def verify(self) -> AsyncGenerator[Findings, None]:
        """Check every file, and yield what was found, folder by folder.

        Rounds go on meanwhile, and whoever does not read on holds nobody up.
        """
        for form in await asyncio.to_thread(self._root.forms):
            async with self._checking:
                findings = await asyncio.to_thread(self._root.verify, form)
            if findings.refused:
                reasons = {fault.value: count for fault, count in findings.refused.items()}
                _log.warning("removed damaged blocks", folder=form, **reasons)
            yield findings

    def _holder(self, worker: Worker) -> Holder:
        figures = _figures(worker)
        seen = self._seen.get(worker.number)
        return Holder(
            form=figures.form,
            nbytes=figures.nbytes,
            share_nbytes=max(figures.budget_nbytes, self._ordered.get(worker.number, 0)),
            least_worth=figures.least_worth if figures.blocks else float("inf"),
            block_nbytes=figures.block_nbytes,
            evicts=seen is not None and figures.evicted > seen.evicted,
        )

    async def _look(self, held: frozenset[str], *, again: bool = False) -> None:
        """Look at the folders that no worker has, where they may have changed."""
        self._rounds += 1
        is_due = again or held != self._held or self._rounds % LOOK_AGAIN_ROUNDS == 1
        # One that a process held then may be nobody's by now, or a worker's that says so soon.
        if not is_due and not any(folder.is_held for folder in self._idle.values()):
            return
        self._held = held
        try:
            forms = await asyncio.to_thread(self._root.forms)
            self._idle = {
                form: await asyncio.to_thread(self._root.survey, form)
                for form in forms
                if form not in held
            }
        except OSError as error:
            _log.warning("cannot look at what is on disk", reason=error.strerror)

    async def _order(self, division: Division, living: list[Worker]) -> None:
        """Have the division come true."""
        for form, kept in division.keep.items():
            await self._trim(self._idle[form], kept)
        of_form = {_figures(worker).form: worker for worker in living}
        for form, share in division.shares.items():
            try:
                await self._give(of_form[form], share)
            except MlxdError as error:
                _log.warning(
                    "worker took no share of the disk",
                    model=of_form[form].name,
                    reason=error.describe(),
                )

    async def _give(self, worker: Worker, nbytes: int) -> None:
        """Give a worker a share. One that does not answer may have taken it."""
        assert worker.link is not None, "it has spoken"
        before = self._ordered_before(worker, _figures(worker))
        self._ordered[worker.number] = max(before, nbytes)
        await worker.link.share_disk(nbytes, timeout_s=config.SHRINK_TIMEOUT_S)
        self._ordered[worker.number] = nbytes

    def _ordered_before(self, worker: Worker, figures: PrefixDiskFigures) -> int:
        return self._ordered.get(worker.number, figures.budget_nbytes)

    async def _trim(self, folder: FormFolder, keep_nbytes: int) -> int:
        """Have an idle folder keep at most so much; return what went."""
        try:
            gone = await asyncio.to_thread(self._root.trim, folder.form, keep_nbytes)
            self._idle[folder.form] = await asyncio.to_thread(self._root.survey, folder.form)
        except OSError as error:
            _log.warning("cannot make room on disk", folder=folder.form, reason=error.strerror)
            return 0
        if gone:
            _log.info("removed blocks", model=folder.about.model, nbytes=gone, folder=folder.form)
        return gone or 0

    def _count(self, living: list[Worker], metrics: Metrics) -> None:
        """Count what workers have done since they were looked at last."""
        for worker in living:
            now = _figures(worker)
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
        InvalidRequest: it cannot be had; says why.
    """
    try:
        return Keeper(budget, open_root(budget.folder))
    except FolderRefused as refused:
        raise InvalidRequest.of("--prefix-disk-folder", str(refused)) from refused


def _with_disk(workers: Iterable[Worker]) -> list[Worker]:
    """Return the workers that are ready and keep something on disk."""
    return [
        worker
        for worker in workers
        if worker.ready_s is not None
        and not worker.stopping
        and worker.link is not None
        and worker.figures is not None
        and worker.figures.prefix_disk is not None
    ]


def _figures(worker: Worker) -> PrefixDiskFigures:
    assert worker.figures is not None, "it has spoken"
    assert worker.figures.prefix_disk is not None, "of what it has on disk"
    return worker.figures.prefix_disk


def _as_folder(worker: Worker) -> FormFolder:
    figures, own = _figures(worker), worker.figures
    assert own is not None, "it has spoken"
    about = About(
        model=worker.name,
        digest=worker.digest,
        weights=own.weights.value,
        context_length=own.context_length,
        device=own.device,
        library=f"mlx {own.mlx_version}",
    )
    return FormFolder(
        figures.form,
        about,
        blocks=figures.blocks,
        nbytes=figures.nbytes,
        least_worth=figures.least_worth,
        is_held=True,
    )


def _plus(dropped: Dropped, blocks: int, nbytes: int) -> Dropped:
    return replace(dropped, blocks=dropped.blocks + blocks, nbytes=dropped.nbytes + nbytes)
