"""The worker on its event loop: who it is, what it serves, and what it may do next.

Invariants:
- Event loop only; everything about arrays goes through the engine thread.
- One load at a time, which runs to its end with or without waiters; any client may watch it. So
  does an unload: one that stopped half way would leave a model that is neither there nor gone.
- The model is reported ready after it is, and draining before it stops being ready.
- New streams are admitted only while it is ready.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from mlxd_shared import config
from mlxd_shared.domain.errors import (
    InvalidRequest,
    MlxdError,
    ModelDraining,
    ModelLoading,
    ModelNotFound,
    ModelUnloaded,
    ShuttingDown,
    WrongWorker,
)
from mlxd_shared.domain.figures import LoadProgress, ModelState
from mlxd_shared.domain.requests import LoadSpec, Weights
from mlxd_shared.ops.findings import Off
from mlxd_shared.ops.known_process import ProcessMark
from mlxd_shared.ops.logs import get_logger
from mlxd_shared.ops.machine import Machine, this_machine
from mlxd_shared.serving.server import Health
from mlxd_worker.chat.room import RenderRoom
from mlxd_worker.constraints.room import CompileRoom
from mlxd_worker.engine.request import Cancel, Submit
from mlxd_worker.front.streams import Streams
from mlxd_worker.machine.backend import Backend
from mlxd_worker.process.lifeline import Lifeline, new_output
from mlxd_worker.thread.engine_thread import EngineThread
from mlxd_worker.thread.facts import Loaded, LoadJob
from mlxd_worker.tokenizing.room import TokenRoom
from mlxd_worker.vision.room import ImageRoom
from mlxd_worker.vision.showings import Showings

LOAD_RETRY_S = 1.0
_log = get_logger("worker")


@dataclass(frozen=True, slots=True)
class Identity:
    """Who this worker is. `started_s` is in seconds since the epoch.

    `device` is the controller's name for the device that it sees; "" if it has none.
    """

    incarnation: str
    address: str
    backend: Backend
    device: str = ""
    machine: Machine = field(default_factory=this_machine)
    off: Off = field(default_factory=dict)
    """The fast paths that are switched off here, with the reasons."""
    started_s: float = field(default_factory=time.time)


class Worker:
    """One worker process. One owner: the event loop."""

    def __init__(
        self,
        identity: Identity,
        engine: EngineThread,
        health: Health,
        *,
        stopping: asyncio.Event,
        waiting_max: int = config.WAITING_STREAMS_MAX,
        replay_steps_max: int = 0,
    ) -> None:
        """Serve nothing yet; `waiting_max` streams may wait later."""
        self.identity = identity
        self.engine = engine
        self.replay_steps_max = replay_steps_max
        """Up to this many tokens of a resumed stream are evaluated one by one, as at first; more
        are evaluated like a prompt, which is faster but rounds differently."""
        self.streams = Streams(waiting_max=waiting_max)
        self.formats = CompileRoom()
        self.chats = RenderRoom()
        self.images = ImageRoom()
        self.showings = Showings(self.images)
        self.tokens = TokenRoom()
        self.stopping = stopping
        """Set once the process has begun to stop; it admits no stream then."""
        self.lifeline: Lifeline | None = None
        """Follows the controller; None if none started this process."""
        self.phase = ModelState.UNLOADED
        self.progress = LoadProgress("")
        self.last_error = ""
        self.loaded: Loaded | None = None
        self._health = health
        self.job: LoadJob | None = None
        """The model that is loaded, being loaded, or failed to load; None if there is none."""
        self._loading: asyncio.Task[Loaded] | None = None
        self._progressed = asyncio.Event()
        self._unloading = asyncio.Lock()
        self._unloads: set[asyncio.Task[int]] = set()

    @property
    def model_name(self) -> str:
        """The model's name; empty while there is none."""
        return self.job.name if self.job else ""

    def check_incarnation(self, incarnation: str, *, required: bool = False) -> None:
        """Raise WrongWorker if a request is for another process, or names none but must."""
        if incarnation != self.identity.incarnation and (incarnation or required):
            raise WrongWorker(incarnation, self.identity.incarnation)

    def check_model(self, model: str) -> Loaded:
        """Return the loaded model for a request's name or digest; an empty one means any.

        Raises:
            ModelNotFound: another model is requested, or none is loaded.
            ModelLoading: it is not ready yet.
        """
        job = self.job
        if job is None or model not in {"", job.name, job.digest}:
            raise ModelNotFound(model, "" if job else "this worker has no model loaded")
        if self.phase is ModelState.LOADING:
            done = self.progress.bytes_read / max(self.progress.bytes_total, 1)
            raise ModelLoading(job.name, LOAD_RETRY_S, progress=done)
        if self.loaded is None:
            raise ModelNotFound(model, "this worker has no model loaded")
        return self.loaded

    def admit(self, model: str) -> Loaded:
        """Return the model for a new stream.

        Raises:
            ShuttingDown: the process is stopping.
            ModelDraining: the model admits no stream any more.
            ModelNotFound, ModelLoading: as `check_model`.
        """
        if self.stopping.is_set():
            raise ShuttingDown
        loaded = self.check_model(model)
        if self.phase is not ModelState.READY:
            raise ModelDraining(loaded.job.name)
        return loaded

    @contextmanager
    def running(self, request: Submit, loaded: Loaded) -> Iterator[None]:
        """Have the engine run a stream; cancel it if the body raises.

        Raises:
            ModelUnloaded: `loaded` is gone.
            QueueFull, ShuttingDown: as `EngineThread.submit`.
        """
        if self.loaded is not loaded:
            raise ModelUnloaded(loaded.job.name)
        self.engine.submit(request)
        try:
            yield
        except BaseException:
            self.engine.cancel(Cancel(request.stream))
            raise

    async def load(self, job: LoadJob) -> AsyncGenerator[LoadProgress, None]:
        """Load `job` unless it is loaded, and yield the progress; the last stage is "ready".

        Raises:
            ShuttingDown: the process is stopping.
            WrongWorker: another model is loaded or being loaded.
            InvalidRequest: the same model, but with other options.
            ModelDraining: the same model is draining, or an unload is in progress.
            InvalidModel: the folder cannot be served.
        """
        if self.stopping.is_set():
            raise ShuttingDown
        if self._unloads:  # the unload would mistake this load for the one it has ended
            raise ModelDraining(job.name)
        if self.job is None or self.phase is ModelState.FAILED:
            self.job, self.phase = job, ModelState.LOADING
            self.progress = LoadProgress("starting")
            coming = self.engine.load(job, self._note)  # started now: from here on it can be ended
            self._loading = asyncio.create_task(self._load(job, coming))
            self._loading.add_done_callback(lambda _: self._wake())
            self._loading.add_done_callback(asyncio.Task.exception)  # maybe without a waiter
        else:
            self._check_same(job)
        loading = self._loading
        assert loading is not None, "a model without a load"
        while True:
            progressed = self._progressed  # taken first, so that nothing in between is missed
            if loading.done():
                break
            yield self.progress
            await progressed.wait()
        await loading
        yield self.progress

    def _check_same(self, job: LoadJob) -> None:
        mine = self.job
        assert mine is not None, "checked by the caller"
        if (job.path, job.name, job.digest) != (mine.path, mine.name, mine.digest):
            raise WrongWorker(job.name, self.identity.incarnation)
        if not self._meets(job.spec):
            raise InvalidRequest.of("options", "the model is loaded with others; unload it first")
        if self.phase in {ModelState.DRAINING, ModelState.UNLOADING}:
            raise ModelDraining(mine.name)

    def _meets(self, spec: LoadSpec) -> bool:
        """Return whether the model is, or is being, loaded as `spec` says.

        Options that `spec` leaves open always match. An adopting controller names what it found.
        """
        mine, loaded = self.job, self.loaded
        assert mine is not None, "checked by the caller"
        if spec == mine.spec:
            return True
        return (
            loaded is not None
            and spec.sampling == mine.spec.sampling
            and spec.context_length in (None, loaded.context_length)
            and spec.rows_max in (None, loaded.rows_max)
            and spec.weights in (Weights.AUTO, loaded.weights)
            and spec.kv_format in (None, loaded.kv_format)
            and spec.prefix_cache_nbytes in (None, loaded.prefix_cache_nbytes)
        )

    async def _load(self, job: LoadJob, coming: Awaitable[Loaded]) -> Loaded:
        try:
            loaded = await coming
        except Exception as error:
            known = error.describe() if isinstance(error, MlxdError) else type(error).__name__
            self.phase, self.last_error = ModelState.FAILED, known
            _log.error("the load failed", model=job.name, reason=known)
            raise
        self.loaded, self.phase, self.last_error = loaded, ModelState.READY, ""
        await self._health.set(f"models/{job.name}", serving=True)
        _log.info(
            "ready",
            model=job.name,
            digest=job.digest,
            weights=loaded.weights.value,
            kv_format=loaded.kv_format.value,
            prefix_cache_nbytes=loaded.prefix_cache_nbytes,
            context_length=loaded.context_length,
            rows_max=loaded.rows_max,
        )
        return loaded

    def _note(self, progress: LoadProgress) -> None:
        self.progress = progress
        if progress.stage != "ready":  # `_load` reports this once it is true
            self._wake()

    def _wake(self) -> None:
        self._progressed.set()
        self._progressed = asyncio.Event()

    def adopt(self, controller: ProcessMark, *, output_path: str) -> None:
        """Follow this controller, and write to its named pipe, if it has one.

        Raises:
            ShuttingDown: the process is stopping.
            InvalidRequest: there is no such controller or pipe, or another controller lives.
        """
        if self.stopping.is_set():
            raise ShuttingDown
        if self.lifeline is None:
            raise InvalidRequest.of("controller_pid", "no controller started this worker")
        with new_output(output_path):
            self.lifeline.follow(controller)
        _log.info("adopted", model=self.model_name, controller_pid=controller.pid)

    async def drain(self, grace_s: float) -> int:
        """Admit no more streams; return how many still run after at most `grace_s`."""
        await self._close()
        return await self.streams.drain(min(grace_s, config.LOAD_TOTAL_TIMEOUT_S))

    async def _close(self) -> None:
        if self.loaded is not None and self.phase is ModelState.READY:
            self.phase = ModelState.DRAINING
            await self._health.set(f"models/{self.loaded.job.name}", serving=False)

    async def unload(self) -> int:
        """End every stream with ModelUnloaded and unload the model; idempotent.

        A load in progress is abandoned. Returns MLX's active bytes afterwards.
        """
        task = asyncio.create_task(self._unload())
        self._unloads.add(task)
        task.add_done_callback(self._unloads.discard)
        return await asyncio.shield(task)

    async def _unload(self) -> int:
        async with self._unloading:
            if self._loading is not None:
                self.engine.abandon_load()
                await asyncio.wait([self._loading])
            name = self.model_name
            await self._close()
            self.phase = ModelState.UNLOADING
            if self.loaded is not None:
                await self.tokens.forget(self.loaded.tokenizer, name)
            active_nbytes = await self.engine.unload(ModelUnloaded(name))
            self.loaded = self.job = self._loading = None
            self.phase, self.progress = ModelState.UNLOADED, LoadProgress("")
        _log.info("unloaded", model=name, mlx_active_nbytes=active_nbytes)
        return active_nbytes
