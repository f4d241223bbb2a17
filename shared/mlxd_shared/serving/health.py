"""grpc.health.v1: what serves, for those who ask and those who watch.

Invariants:
- At most HEALTH_NAMES_MAX names have a health. A new one takes the place of the one that was told
  longest ago and does not serve; where all serve it has none.
- A watcher is told the state at once and each state that it goes over to, SERVICE_UNKNOWN where
  there is none. One that is slow is told the latest, and holds up nobody.
- After `leave` nothing serves, whatever is told.

The servicer that comes with grpcio-health-checking does none of it: a name stays for good, one
watcher that leaves takes the others' news along, and a slow one keeps the state from being set.
"""
# ruff: noqa: N802 - names and signatures are gRPC's

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from mlxd_shared.config import HEALTH_NAMES_MAX
from mlxd_shared.wire.interceptors import Context
from mlxd_shared.wire.status import shorten

_Answer = health_pb2.HealthCheckResponse


class Health(health_pb2_grpc.HealthServicer):
    """The health of "", each service, and `models/<name>`. One owner: the event loop."""

    def __init__(self) -> None:
        """Begin with a process that serves and has no services yet."""
        self._serving: dict[str, bool] = {"": True}
        self._watchers: dict[str, set[asyncio.Event]] = {}
        self._left = False

    async def set(self, name: str, *, serving: bool) -> None:
        """Say whether `name` serves now."""
        if self._left:
            return
        self._serving.pop(name, None)
        if len(self._serving) >= HEALTH_NAMES_MAX and not self._make_room():
            return
        self._serving[name] = serving
        self._wake(name)

    def forget(self, name: str) -> None:
        """Have nothing known of `name`, if anything is."""
        if not self._left and self._serving.pop(name, None) is not None:
            self._wake(name)

    async def leave(self) -> None:
        """Say NOT_SERVING for everything, for good: the first step of a graceful stop."""
        self._left = True
        for name in self._serving:
            self._serving[name] = False
            self._wake(name)

    def of(self, name: str) -> int:
        """Return the state of `name` now."""
        serving = self._serving.get(name)
        if serving is None:
            return _Answer.SERVICE_UNKNOWN
        return _Answer.SERVING if serving else _Answer.NOT_SERVING

    async def Check(self, request: health_pb2.HealthCheckRequest, context: Context) -> _Answer:
        """Return the state now; NOT_FOUND if there is none, as the protocol demands."""
        state = self.of(request.service)
        if state == _Answer.SERVICE_UNKNOWN:
            problem = f"nothing is known of the health of {request.service!r}"
            await context.abort(grpc.StatusCode.NOT_FOUND, shorten(problem))
        return _Answer(status=state)

    async def Watch(
        self, request: health_pb2.HealthCheckRequest, context: Context
    ) -> AsyncGenerator[_Answer, None]:
        """Yield the state now, and each that the name goes over to; never ends by itself."""
        del context
        name, news = request.service, asyncio.Event()
        self._watchers.setdefault(name, set()).add(news)
        try:
            last = None
            while True:
                news.clear()
                state = self.of(name)
                if state != last:
                    last = state
                    yield _Answer(status=state)
                await news.wait()
        finally:
            self._watchers[name].remove(news)
            if not self._watchers[name]:
                del self._watchers[name]

    def _make_room(self) -> bool:
        """Forget the name told longest ago that does not serve; False: all of them do."""
        oldest = next((name for name, serving in self._serving.items() if not serving), None)
        if oldest is not None:
            self.forget(oldest)
        return oldest is not None

    def _wake(self, name: str) -> None:
        for news in self._watchers.get(name, ()):
            news.set()
