"""A controller in this process with real workers, which are struck as soon as streams are so long.

Invariants:
- A stream that has come to the blow's offset is read no further: what its worker said beyond is
  lost with it. So the offset is exact, however fast the worker is.
- The blow falls when every stream of the round has come there or has ended.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import grpc

from mlxd.v1 import inference_pb2, inference_pb2_grpc
from mlxd_controller.core.state import State
from mlxd_controller.launcher.environment import own_environment
from mlxd_controller.launcher.subprocess import SubprocessLauncher
from mlxd_controller.memory.device import HostProbe
from mlxd_controller.runtime.ports import Ports, RawStream, SystemClock
from mlxd_controller.runtime.runtime import Runtime
from mlxd_controller.runtime.worker_link import GrpcLink
from mlxd_controller.settings import Limits
from mlxd_controller.store.model_library import Library
from mlxd_shared import config
from mlxd_shared.domain.devices import DeviceKind
from mlxd_shared.wire.proof import Checked
from mlxd_shared.wire.status import RemoteError
from tests.support.controller_stack import serving

NAME = "m"
WORKER_MODULE = "tests.support.single_token_worker"


@dataclass(slots=True)
class Blow:
    """What happens to the worker of `streams` streams once each has `offset` tokens."""

    offset: int
    streams: int = 1
    number: signal.Signals = signal.SIGKILL
    arrived: int = 0
    held: int = 0
    fell: asyncio.Event = field(default_factory=asyncio.Event)
    fell_s: float = 0.0


@dataclass(slots=True)
class Struck:
    """The controller, and the next blow."""

    runtime: Runtime
    channel: grpc.aio.Channel
    blow: Blow | None = None
    inference: inference_pb2_grpc.InferenceServiceAsyncStub = field(init=False)

    def __post_init__(self) -> None:
        self.inference = inference_pb2_grpc.InferenceServiceStub(self.channel)

    @property
    def pid(self) -> int:
        """The process that serves."""
        (worker,) = self.runtime.workers.live()
        assert worker.process is not None
        return worker.process.pid

    def strike(
        self, offset: int, *, streams: int = 1, number: signal.Signals = signal.SIGKILL
    ) -> Blow:
        """Have the worker struck once each of the next `streams` streams has `offset` tokens."""
        self.blow = Blow(offset, streams, number)
        return self.blow

    def note_arrival(self, blow: Blow, *, held: bool) -> None:
        """Count a stream that is held at the offset, or has ended; the last one brings the blow."""
        blow.arrived += 1
        blow.held += held
        if blow.arrived < blow.streams:
            return
        self.blow = None
        if blow.held:
            blow.fell_s = time.monotonic()
            os.kill(self.pid, blow.number)
            blow.fell.set()

    async def unload(self) -> None:
        """Unload the model, after which no failure of it is remembered."""
        (digest,) = self.runtime.state.models
        await self.runtime.unload(digest, grace_s=0.0, force=True)


class StruckStream:
    """Implements ports.RawStream: reads up to the blow."""

    def __init__(self, inner: RawStream, struck: Struck, begins_at: int) -> None:
        self._inner = inner
        self._struck = struck
        self._blow = struck.blow if begins_at == 0 else None
        self._tokens = 0

    async def read(self) -> bytes | None:
        """Return the next message; at the blow's offset what the worker's end brings."""
        blow = self._blow
        if blow is not None and self._tokens >= blow.offset:
            assert self._tokens == blow.offset, "messages have one token each"
            self._blow = None
            self._struck.note_arrival(blow, held=True)
            await blow.fell.wait()
            while await self._inner.read() is not None:
                pass  # lost on its way
            raise RemoteError(grpc.StatusCode.UNAVAILABLE, "the worker has ended")
        frame = await self._inner.read()
        message = inference_pb2.GenerateResponse.FromString(frame or b"")
        self._tokens += len(message.token_ids)
        if blow is not None and (frame is None or message.HasField("finish")):
            self._blow = None
            self._struck.note_arrival(blow, held=False)
        return frame

    def cancel(self) -> None:
        """Tell the worker to stop."""
        self._inner.cancel()


class StruckLink(GrpcLink):
    """A link whose streams are read up to the blow."""

    struck: Struck

    def generate(  # type: ignore[override]
        self, request: Checked, *, timeout_s: float | None
    ) -> RawStream:
        """Start a Generate."""
        inner = super().generate(request, timeout_s=timeout_s)
        begins_at = inference_pb2.GenerateRequest.FromString(request.whole()).resume_from
        return StruckStream(inner, self.struck, begins_at)


@asynccontextmanager
async def struck_controller(
    folder: Path,
    *,
    environment: Mapping[str, str] = MappingProxyType({}),
    silent_max_s: float = config.WORKER_SILENT_MAX_S,
    module: str = WORKER_MODULE,
) -> AsyncIterator[Struck]:
    """Serve the model in `folder` around the body; at the end no worker is left.

    module: what a worker's process runs.
    """
    launcher = SubprocessLauncher(
        command=(sys.executable, "-m", module),
        environment=own_environment() | dict(environment),
    )
    probe = HostProbe(Limits(None, None, config.MEMORY_RESERVE_FRACTION), kind=DeviceKind.CPU)
    links: list[Struck] = []

    def connect(**fields: Any) -> StruckLink:
        link = StruckLink(**fields)
        link.struck = links[0]
        return link

    clock = SystemClock()
    ports = Ports(launcher, connect, probe, clock)
    state = State(devices=probe.read(()))
    runtime = Runtime(ports, state, stall_timeout_s=60.0, silent_max_s=silent_max_s)
    try:
        async with serving(runtime, Library([(NAME, folder)]), clock) as channel:
            links.append(Struck(runtime, channel))
            yield links[0]
    finally:
        launcher.close()
