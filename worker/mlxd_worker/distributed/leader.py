"""The first rank: it alone is asked and answers, and has the others do what its own host does.

The ranks are one state machine, replicated: equal calls and equal readings leave equal states, and
so the same tokens are drawn everywhere, from equal logits.

Invariants:
- A call goes to the followers before it is made here, and each reading of the clock or of memory in
  it when it is made. What is read between calls is nobody else's.
- The group is the unit of failure: a follower that ends, falls silent, stands still or fails alone
  ends this process at once, as anything does that fails here. Nothing is tried again.
- A load that is given up goes on to its end, because the others load as well, and is undone then.
"""

from __future__ import annotations

import os
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Final, NoReturn

from mlxd_shared import config
from mlxd_shared.domain.devices import DeviceKind
from mlxd_shared.domain.errors import (
    FieldNotServed,
    LoadAbandoned,
    MlxdError,
    ShuttingDown,
)
from mlxd_shared.domain.figures import LoadProgress
from mlxd_shared.ops.logs import get_logger
from mlxd_worker.distributed.checks import mark_of
from mlxd_worker.distributed.frames import (
    FrameKind,
    Wire,
    WireBroken,
    pack_load,
    pack_real,
    pack_submit,
    pack_whole,
)
from mlxd_worker.distributed.group import Group, join_group, make_group
from mlxd_worker.engine.request import Cancel, Failed, Submit
from mlxd_worker.thread.facts import Loaded, LoadJob, Report
from mlxd_worker.thread.host import ModelHost
from mlxd_worker.thread.readings import LOCAL

FOLLOWER: Final = "mlxd_worker.distributed"

GROUP_FAILED: Final = 70
"""How the process ends with its group: as it does after any failure of the engine."""

_log = get_logger("ranks")


class Followers:
    """The other ranks' processes and the wires to them; a thread each listens to them."""

    def __init__(self, group: Group, module: str) -> None:
        """Start them as `python -m module`; they end when this process does, however it does."""
        self._limit_s = config.RANK_STEP_S
        if group.kind is DeviceKind.CPU:
            self._limit_s = config.RANK_STEP_CPU_S
        self.outcomes: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._never = threading.Event()
        self._due_s: float | None = time.monotonic() + config.RANK_JOIN_S
        self._heard_s: dict[int, float] = {}
        self._wires: dict[int, Wire] = {}
        self._processes: list[subprocess.Popen[bytes]] = []
        self.pids: dict[int, int] = {}
        for rank in range(1, group.ranks):
            own, theirs = socket.socketpair()
            with theirs:
                command = [sys.executable, "-m", module, "--fd"]
                command += [str(theirs.fileno()), "--rank", str(rank), "--ranks", str(group.ranks)]
                process = subprocess.Popen(
                    command,
                    env={**os.environ, **group.environment(rank)},
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                )
            self._processes.append(process)
            self.pids[rank], self._wires[rank] = process.pid, Wire(own)
            self._heard_s[rank] = time.monotonic() + config.RANK_JOIN_S
            self._start(self._listen, rank, process)
        self._start(self._watch)

    def send(self, kind: FrameKind, body: bytes = b"") -> None:
        """Send a frame to all; ends the process where that fails."""
        for rank, wire in self._wires.items():
            try:
                wire.send(kind, body)
            except WireBroken as error:
                self.fail(f"rank {rank}: {error}")

    def begin(self, *, limited: bool) -> None:
        """Know that a call has begun; one that is limited takes no longer than a step may."""
        self._due_s = time.monotonic() + self._limit_s if limited else None

    def end(self) -> None:
        """Know that it is over."""
        self._due_s = None

    def agree(self, *, loaded: bool) -> None:
        """Wait until all have loaded, or refused, as this rank has; end the process elsewise."""
        for _ in self._wires:
            try:
                outcome = self.outcomes.get(timeout=self._limit_s)
            except queue.Empty:
                self.fail("a rank has not said whether it loaded")
            if outcome != loaded:
                self.fail("some ranks loaded and some did not")

    def fail(self, reason: str) -> NoReturn:
        """End all ranks at once: kernels may wait for those that are gone, for ever.

        One that is stopped would not see that its leader has ended.
        """
        _log.critical("the ranks end", reason=reason)
        for process in self._processes:
            process.kill()
        os._exit(GROUP_FAILED)

    def _start(self, act: Callable[..., None], *arguments: object) -> None:
        threading.Thread(target=act, args=arguments, name="ranks", daemon=True).start()

    def _listen(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        try:
            while True:
                frame = self._wires[rank].receive()
                self._heard_s[rank] = time.monotonic()
                if frame.kind in {FrameKind.LOADED, FrameKind.REFUSED}:
                    if frame.kind is FrameKind.REFUSED and self._due_s is None:
                        # This rank may wait for it in the middle of its own load.
                        self._due_s = time.monotonic() + self._limit_s
                    self.outcomes.put(frame.kind is FrameKind.LOADED)
        except WireBroken:
            code = process.poll()
            self.fail(f"rank {rank} is gone" + ("" if code is None else f", exit code {code}"))

    def _watch(self) -> None:
        while not self._never.wait(config.RANK_BEAT_S / 2):
            now_s, due_s = time.monotonic(), self._due_s
            for rank, heard_s in self._heard_s.items():
                if now_s - heard_s > config.RANK_SILENT_S:
                    self.fail(f"rank {rank} is silent")
            if due_s is not None and now_s > due_s:
                self.fail("a step is not over in time")


class SentReadings:
    """The leader's own readings; those that are made in a call go to the followers."""

    def __init__(self, followers: Followers) -> None:
        self._followers = followers
        self.sends = False
        """Whether a call is being made."""

    def now_s(self) -> float:
        """Return the monotonic clock."""
        value = LOCAL.now_s()
        if self.sends:
            self._followers.send(FrameKind.CLOCK, pack_real(value))
        return value

    def held_nbytes(self) -> int:
        """Return what MLX holds on this rank."""
        return self._send(LOCAL.held_nbytes())

    def available_nbytes(self, kind: DeviceKind) -> int:
        """Return what a rank may take: ranks on CPUs have one memory."""
        value = LOCAL.available_nbytes(kind)
        if kind is DeviceKind.CPU:
            value //= len(self._followers.pids) + 1
        return self._send(value)

    def _send(self, value: int) -> int:
        if self.sends:
            self._followers.send(FrameKind.NBYTES, pack_whole(value))
        return value


class LeaderHost(ModelHost):
    """The first rank's host: what it does, the followers' hosts do."""

    def __init__(self, device: DeviceKind, *, ranks: int, module: str = FOLLOWER) -> None:
        """Start the followers and meet them; raises BackendProblem where that fails.

        module: what followers run.
        """
        group = make_group(ranks, device)
        os.environ.update(group.environment(0))
        self._followers = Followers(group, module)
        share = join_group(0, ranks, device)
        self._followers.end()
        _log.info("ranks have met", ranks=ranks, followers=list(self._followers.pids.values()))
        self._sent = SentReadings(self._followers)
        self._steps = 0
        super().__init__(device=device, share=share, readings=self._sent)

    @property
    def followers(self) -> Mapping[int, int]:
        """Return the other ranks' processes: their ids by rank."""
        return self._followers.pids

    def load(self, job: LoadJob, report: Report) -> Loaded:
        """Load on all ranks; raises as `ModelHost.load`, after all have."""
        given_up: list[LoadAbandoned] = []

        def go_on(progress: LoadProgress) -> None:
            try:
                report(progress)
            except LoadAbandoned as error:
                given_up.append(error)

        with self._call(FrameKind.LOAD, pack_load(job), limited=False):
            try:
                loaded = super().load(job, go_on)
            except MlxdError:
                self._followers.agree(loaded=False)
                raise
            self._followers.agree(loaded=True)
        if given_up:
            self.unload(ShuttingDown())
            raise given_up[0]
        return loaded

    def unload(self, error: MlxdError) -> int:
        """Unload on all ranks."""
        with self._call(FrameKind.UNLOAD):
            return super().unload(error)

    def shrink(self, target_nbytes: int) -> tuple[int, int]:
        """Have each rank release what this one does."""
        with self._call(FrameKind.SHRINK, pack_whole(target_nbytes)):
            return super().shrink(target_nbytes)

    def submit(self, request: Submit) -> None:
        """Hand a stream to all engines; one whose output has a format is refused."""
        if request.constraint is not None:
            # Masks are made by threads, whose pace would be each rank's own.
            problem = FieldNotServed("response_format or tools of a model over several ranks")
            request.sink.put(Failed(problem))
            return
        with self._call(FrameKind.SUBMIT, pack_submit(request)):
            super().submit(request)

    def cancel(self, request: Cancel) -> None:
        """Forget a stream on all ranks."""
        with self._call(FrameKind.CANCEL, pack_whole(request.stream)):
            super().cancel(request)

    def step(self) -> None:
        """Do one step on all ranks."""
        with self._call(FrameKind.STEP):
            super().step()
        self._steps += 1
        if self._steps % config.RANK_CHECK_STEPS == 0:
            self._followers.send(FrameKind.CHECK, mark_of(self.marks()))

    def end_streams(self, error: MlxdError) -> None:
        """End every stream on all ranks."""
        with self._call(FrameKind.END_STREAMS):
            super().end_streams(error)

    def rest(self) -> None:
        """Release what is kept for later streams, on all ranks."""
        with self._call(FrameKind.REST):
            super().rest()

    @contextmanager
    def _call(self, kind: FrameKind, body: bytes = b"", *, limited: bool = True) -> Iterator[None]:
        """Make a call on all ranks; calls in it are a part of it."""
        if self._sent.sends:
            yield
            return
        self._followers.begin(limited=limited)
        self._followers.send(kind, body)
        self._sent.sends = True
        try:
            yield
        except MlxdError:
            raise
        except BaseException as error:  # noqa: BLE001 - the others may wait for this rank
            self._followers.fail(f"{kind.name}: {error!r}")
        finally:
            self._sent.sends = False
            self._followers.end()
