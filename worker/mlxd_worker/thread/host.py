"""The resident model on the engine thread, its ledger, and the figures about both.

Invariants:
- Everything here runs on the engine thread; what is returned is plain values without arrays.
- At most one model is resident. Unloaded means: nothing pinned, nothing attached, MLX swept.
- The ledger is audited when no stream is left; the status shows that difference until the next one.
"""

from __future__ import annotations

import gc
import os
import time
import traceback
from collections.abc import Callable

import mlx.core as mx
import psutil

from mlxd_shared import config
from mlxd_shared.domain.devices import DeviceKind
from mlxd_shared.domain.errors import MlxdError, ModelNotFound
from mlxd_shared.domain.figures import RankMemory
from mlxd_shared.ops.heap import trim_heap
from mlxd_shared.ops.logs import get_logger
from mlxd_worker.cache.disk.prefixes import PrefixDisk
from mlxd_worker.cache.prefix.lookup import PrefixCounts
from mlxd_worker.constraints.compiler import Constraints
from mlxd_worker.engine.request import Cancel, Failed, Occupancy, Submit
from mlxd_worker.engine.speculation.speculator import SpeculationCounts
from mlxd_worker.machine.device_name import device_name
from mlxd_worker.memory.ledger import Account, Audit, Ledger
from mlxd_worker.models.weights.shards import Share
from mlxd_worker.thread.facts import (
    DiskFolder,
    Figures,
    Loaded,
    LoadJob,
    PrefixFigures,
    Report,
    SpeculationFigures,
)
from mlxd_worker.thread.readings import LOCAL, Readings
from mlxd_worker.thread.resident import Resident, make_resident

_log = get_logger("engine")


class ModelHost:
    """At most one resident model. One owner: the engine thread."""

    def __init__(
        self,
        *,
        device: DeviceKind,
        folder: DiskFolder | None = None,
        share: Share | None = None,
        readings: Readings = LOCAL,
    ) -> None:
        """Hold no model yet; `share` is what of any model this process has, None for all."""
        self._device = device
        self._folder = folder
        self._share = share
        self._readings = readings
        self._ledger = Ledger()
        self._resident: Resident | None = None
        self._absent: MlxdError = ModelNotFound("", "no model is loaded")
        self._pool_limit_nbytes = _pool_limit_nbytes()
        self._memory_limit_nbytes = mx.get_memory_limit()
        self._counts: dict[str, PrefixCounts] = {}
        self._guesses: dict[str, SpeculationCounts] = {}
        self._unaccounted_nbytes = 0
        self._holds = True

    @property
    def busy(self) -> bool:
        """Whether a step would do anything."""
        return self._resident is not None and self._resident.engine.busy

    @property
    def formats(self) -> Constraints | None:
        """What compiles formats for the resident model; any thread. None: there is no model."""
        return None if self._resident is None else self._resident.facts.constraints

    def device_name(self) -> str:
        """Return the device's own name."""
        return device_name(self._device)

    def load(self, job: LoadJob, report: Report) -> Loaded:
        """Make the model of `job` resident; none may be; raises as `make_resident`."""
        assert self._resident is None, "unload first"
        try:
            counts = self._counts.get(job.name) or PrefixCounts()
            guesses = self._guesses.get(job.name) or SpeculationCounts()
            resident = make_resident(
                job,
                device=self._device,
                report=report,
                counts=counts,
                guesses=guesses,
                folder=self._folder,
                share=self._share,
                readings=self._readings,
            )
        except Exception as error:
            _forget_locals(error)
            self._lift_limits()
            self._sweep()
            raise
        self._ledger.pin_all(Account.WEIGHTS, resident.model.parameters())
        self._ledger.attach(Account.KV, "rows", resident.caches)
        contents = resident.caches.contents
        self._ledger.attach(Account.PREFIX, "snapshots", contents.book, tally=contents.book.tally)
        if resident.gallery is not None:
            self._ledger.attach(Account.IMAGES, "features", resident.gallery)
        self._counts[job.name] = counts
        self._guesses[job.name] = guesses
        self._resident = resident
        self._sweep()
        return resident.facts

    def unload(self, error: MlxdError) -> int:
        """End every stream with `error`, unload the model; return MLX's active bytes afterwards."""
        if self._resident is not None:
            self.close()
            self._resident.prefix.clear()  # first, so that no row's prefix is copied out to be kept
        self.end_streams(error)
        self._absent = error
        if self._resident is not None:
            for name in self._resident.model.parameters():
                self._ledger.unpin(Account.WEIGHTS, name)
            self._ledger.detach(Account.KV, "rows")
            self._lift_limits()
            self._ledger.detach(Account.PREFIX, "snapshots")
            if self._resident.gallery is not None:
                self._ledger.detach(Account.IMAGES, "features")
            self._resident = None
        return self._sweep().active_nbytes

    def close(self) -> None:
        """Write the blocks worth keeping, and end the threads that write and read."""
        disk = self._disk
        if disk is not None:
            disk.close(timeout_s=config.PREFIX_SAVE_S)

    def leave(self) -> None:
        """Know that the thread that made this host ends, and that nothing is asked of it again."""

    def shrink(self, target_nbytes: int) -> tuple[int, int]:
        """Release what no stream needs until `target_nbytes` are held; return before and after.

        First spare arenas, features of images and MLX's pool, then the least valuable snapshots, no
        more than needed.
        """
        before_nbytes = held_nbytes = self._readings.held_nbytes()
        if held_nbytes > target_nbytes:
            if self._resident is not None:
                self._resident.caches.rest()
                self._forget_images()
            mx.clear_cache()
            held_nbytes = self._readings.held_nbytes()
            if held_nbytes > target_nbytes and self._resident is not None:
                prefix = self._resident.prefix
                prefix.shrink(prefix.nbytes - (held_nbytes - target_nbytes))
                mx.clear_cache()
                held_nbytes = self._readings.held_nbytes()
            trim_heap()
        return before_nbytes, held_nbytes

    def submit(self, request: Submit) -> None:
        """Hand a stream to the engine; without a model it fails with the unload's error."""
        if self._resident is None:
            request.sink.put(Failed(self._absent))
        else:
            self._resident.engine.submit(request)

    def cancel(self, request: Cancel) -> None:
        """Forget a stream."""
        if self._resident is not None:
            self._resident.engine.cancel(request.stream)

    def step(self) -> None:
        """Do one step of the engine."""
        assert self._resident is not None, "busy without a model"
        self._resident.engine.step()

    def marks(self) -> tuple[tuple[int, ...], ...]:
        """Return what is equal on all ranks of a model after equal calls: streams and prefixes."""
        if self._resident is None:
            return ()
        prefix = (self._resident.prefix.nbytes, self._resident.caches.contents.book.live)
        return (*self._resident.engine.marks(), prefix)

    def end_streams(self, error: MlxdError) -> None:
        """End every stream with `error` and free its row."""
        if self._resident is not None:
            self._resident.engine.release_all(error)

    def fail_all(self, error: MlxdError) -> None:
        """End every stream with `error`, touching nothing else."""
        if self._resident is not None:
            self._resident.engine.fail_all(error)

    def rest(self) -> None:
        """Release what is kept for later streams: arenas, MLX's pool, compiled formats."""
        if self._resident is not None:
            self._resident.caches.rest()
            self._forget_images()
            mx.clear_cache()
            self._resident.facts.constraints.rest()
            trim_heap()

    def _forget_images(self) -> None:
        """Drop the features of images: a row that needs them sees its own again."""
        if self._resident is not None and self._resident.gallery is not None:
            self._resident.gallery.clear()

    def settle(self) -> Figures:
        """Audit the ledger while no stream is left, and return the figures."""
        audit = self._ledger.audit()
        self._unaccounted_nbytes = audit.unaccounted_nbytes
        if self._holds and not audit.holds:
            _log.warning(
                "the ledger does not hold",
                unaccounted_nbytes=audit.unaccounted_nbytes,
                tolerance_nbytes=audit.tolerance_nbytes,
            )
        self._holds = audit.holds
        return self.figures()

    def figures(self) -> Figures:
        """Return the current figures."""
        resident, disk, disk_figures = self._resident, self._disk, None
        if resident is not None and disk is not None:
            disk_figures = disk.figures(hit_tokens=resident.prefix.counts.disk_tokens)
        engine = resident.engine if resident else None
        return Figures(
            at_s=time.monotonic(),
            load=engine.occupancy() if engine else Occupancy(),
            accounts=self._ledger.report(),
            mlx_active_nbytes=mx.get_active_memory(),
            mlx_cache_nbytes=mx.get_cache_memory(),
            mlx_peak_nbytes=mx.get_peak_memory(),
            prefix_snapshots=resident.caches.contents.book.live if resident else 0,
            prefixes=tuple((name, _figures_of(counts)) for name, counts in self._counts.items()),
            speculations=tuple(
                (name, SpeculationFigures(counts.drafted_tokens, counts.accepted_tokens))
                for name, counts in self._guesses.items()
            ),
            prefix_disk=disk_figures,
            prefix_reload_s=resident.prefix.reload_s if resident else 0.0,
            can_guess=engine is not None and engine.can_guess,
            unaccounted_nbytes=self._unaccounted_nbytes,
            ranks=self.ranks(),
        )

    def ranks(self) -> tuple[RankMemory, ...]:
        """Return what each process holds that shares the model; () for one alone."""
        return ()

    def share_disk(self, nbytes: int, applied: Callable[[], None]) -> None:
        """Have what is on disk take at most so much; `applied` is called, on any thread, then."""
        disk = self._disk
        if disk is None:
            applied()
        else:
            disk.tier.set_budget(nbytes, applied)

    @property
    def _disk(self) -> PrefixDisk | None:
        return None if self._resident is None else self._resident.prefix.disk

    def _lift_limits(self) -> None:
        """Restore MLX's limits from before a model was loaded."""
        mx.set_cache_limit(self._pool_limit_nbytes)
        mx.set_memory_limit(self._memory_limit_nbytes)

    def _sweep(self) -> Audit:
        # A traceback or a cycle may keep dropped arrays alive.
        gc.collect()
        audit = self._ledger.sweep()
        trim_heap()
        self._unaccounted_nbytes = audit.unaccounted_nbytes
        return audit


def rank_memory() -> RankMemory:
    """Return what this process holds; on any thread."""
    return RankMemory(
        pid=os.getpid(),
        mlx_active_nbytes=mx.get_active_memory(),
        mlx_cache_nbytes=mx.get_cache_memory(),
        mlx_peak_nbytes=mx.get_peak_memory(),
        resident_nbytes=psutil.Process().memory_info().rss,
    )


def _figures_of(counts: PrefixCounts) -> PrefixFigures:
    return PrefixFigures(
        lookups=tuple(
            ("hit" if hit else "miss", reason.value, count)
            for (hit, reason), count in sorted(counts.lookups.items())
        ),
        hit_tokens=counts.hit_tokens,
        disk_tokens=counts.disk_tokens,
        evictions=counts.evictions,
        evicted_nbytes=counts.evicted_nbytes,
    )


def _pool_limit_nbytes() -> int:
    """Return the limit of MLX's pool; setting it is the only way to read it."""
    limit_nbytes = mx.set_cache_limit(0)
    mx.set_cache_limit(limit_nbytes)
    return limit_nbytes


def _forget_locals(error: BaseException) -> None:
    """Empty the frames behind `error`: they would keep the arrays of a failed load alive."""
    seen: BaseException | None = error
    while seen is not None:
        traceback.clear_frames(seen.__traceback__)
        seen = seen.__cause__ or seen.__context__
