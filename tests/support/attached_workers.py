"""Workers that say what a test wants, on real sockets, and a launcher that they are attached to."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from mlxd.v1 import (
    status_pb2,
    status_pb2_grpc,
    types_pb2,
    worker_pb2,
    worker_pb2_grpc,
)
from mlxd_controller.launcher.attached import GONE_WAIT_S, AttachedLauncher
from mlxd_controller.launcher.station import SILENCE_S_MAX
from mlxd_shared.domain.errors import MlxdError
from mlxd_shared.security.net import parse_address
from mlxd_shared.serving.server import Health, listen, make_server

TIMEOUT_S = 60.0


class Scripted(status_pb2_grpc.StatusServiceServicer, worker_pb2_grpc.WorkerServiceServicer):
    """A worker that says what a test wants, as soon as the test changes it."""

    def __init__(self, incarnation: str, *, on: str = "") -> None:
        self.worker = status_pb2.WorkerStatus(pid=7, incarnation=incarnation, backend="mlx-cpu")
        self.worker.memory.resident_bytes = 100
        self.worker.context_length, self.worker.rows_max = 512, 2
        self.host = status_pb2.HostMemory(
            machine=on, machine_id=on and f"id-{on}", total_bytes=10_000, available_bytes=5_000
        )
        self.unloads: list[str] = []
        self.loads = 0
        self.load_errors: list[MlxdError] = []
        self.watches = 0
        self._silent = self._mute = False
        self._changed = asyncio.Event()

    def say(self, *, incarnation: str = "", model: str = "", digest: str = "") -> None:
        """Change what is said, and say it at once."""
        self.worker.model_digest = digest
        self.worker.incarnation = incarnation or self.worker.incarnation
        self.worker.model_name = model
        self.worker.state = types_pb2.MODEL_STATE_READY if model else types_pb2.MODEL_STATE_UNLOADED
        self._changed.set()

    def fall_mute(self) -> None:
        """Say nothing any more, though the connection stands."""
        self._mute = True

    def fall_silent(self) -> None:
        """End the watch, and refuse any other."""
        self._silent = True
        self._changed.set()

    def speak_again(self) -> None:
        """Say again what was said before."""
        self._silent = False

    async def WatchStatus(  # noqa: N802
        self, request: status_pb2.WatchStatusRequest, context: object
    ) -> AsyncIterator[status_pb2.WatchStatusResponse]:
        """Say it, and again at each change."""
        self.watches += 1
        while not self._silent:
            if self._mute:
                await asyncio.Event().wait()
            self._changed.clear()
            status = status_pb2.Status(workers=[self.worker], host_memory=self.host)
            yield status_pb2.WatchStatusResponse(status=status)
            await self._changed.wait()

    async def Load(  # noqa: N802
        self, request: worker_pb2.LoadRequest, context: object
    ) -> AsyncIterator[worker_pb2.LoadResponse]:
        """Fail as scripted, or be ready."""
        self.loads += 1
        if self.load_errors:
            raise self.load_errors.pop(0)
        yield worker_pb2.LoadResponse(progress=types_pb2.LoadProgress(stage="ready"))

    async def Unload(  # noqa: N802
        self, request: worker_pb2.UnloadRequest, context: object
    ) -> worker_pb2.UnloadResponse:
        """Note who was meant."""
        self.unloads.append(request.worker_incarnation)
        return worker_pb2.UnloadResponse()

    async def _refuse_call(self, request: object, context: object) -> worker_pb2.ShutdownResponse:
        raise AssertionError(request)

    GetStatus = Shrink = Drain = Shutdown = Adopt = _refuse_call  # type: ignore[assignment]


@asynccontextmanager
async def attach_launcher(
    *workers: Scripted,
    wait_s: float = TIMEOUT_S,
    gone_wait_s: float = GONE_WAIT_S,
    silence_s_max: float = SILENCE_S_MAX,
    restart_s: float = TIMEOUT_S,
) -> AsyncIterator[AttachedLauncher]:
    """A launcher that has heard all these workers."""
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="mlxd-"))
        named = []
        for number, worker in enumerate(workers):
            server = make_server(Health(), ())
            status_pb2_grpc.add_StatusServiceServicer_to_server(worker, server)
            worker_pb2_grpc.add_WorkerServiceServicer_to_server(worker, server)
            target = listen(server, parse_address(f"unix:{folder}/{number}"))
            await server.start()
            stack.push_async_callback(server.stop, None)
            named.append((f"w{number}", target))
        launcher = AttachedLauncher(
            named,
            wait_s=wait_s,
            gone_wait_s=gone_wait_s,
            silence_s_max=silence_s_max,
            restart_s=restart_s,
        )
        watching = asyncio.create_task(launcher.run())
        try:
            assert len(await launcher.wait_for_figures(wait_s=TIMEOUT_S)) == len(workers)
            yield launcher
        finally:
            watching.cancel()
            await asyncio.wait([watching])
            assert watching.cancelled()
