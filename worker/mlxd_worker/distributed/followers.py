"""The processes that follow: started, listened to, and ended together with their leader.

Invariants:
- The group is the unit of failure: a follower that ends, falls silent or stands still ends this
  process at once, and all others first. Nothing is tried again.
- All say that they are about to join before anyone does: MLX holds the interpreter while it joins,
  and nothing but a timer outside the interpreter (`group.join_group`) ends a join then.
- What a stop sends to all processes at once ends no follower, not even one that has just begun.
"""

from __future__ import annotations

import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import NoReturn

from mlxd_shared import config
from mlxd_shared.domain.devices import DeviceKind
from mlxd_shared.domain.errors import ShuttingDown
from mlxd_shared.domain.figures import RankMemory
from mlxd_shared.ops.logs import get_logger
from mlxd_worker.distributed.frames import FrameKind, Wire, WireBroken, memory_of
from mlxd_worker.distributed.group import STOP_SIGNALS, Group
from mlxd_worker.distributed.patience import LOOK_S, Patience
from mlxd_worker.process.exit_code import ExitCode

END_SEEN_S = 1.0
"""How long the system may take to tell of an end after it has closed the wire."""
SEEN_LOOK_S = 0.01
_log = get_logger("ranks")


class Followers:
    """The other ranks' processes and the wires to them; a thread each listens to them."""

    def __init__(self, group: Group, module: str, arguments: Sequence[str]) -> None:
        """Start them as `python -m module`; they end when this process does, however it does.

        arguments: further ones of their command line.
        """
        self.ranks = group.ranks
        on_cpu = group.kind is DeviceKind.CPU
        self._step_s = config.RANK_STEP_CPU_S if on_cpu else config.RANK_STEP_S
        self._outcomes: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._refused = False
        self._joining: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._given_up = threading.Event()
        self._wires: dict[int, Wire] = {}
        self._processes: list[subprocess.Popen[bytes]] = []
        self.memory: dict[int, RankMemory] = {}
        """What each said last that it holds."""
        self._patience = Patience(time.monotonic())
        self._patience.begin(config.RANK_JOIN_S)
        for rank in range(1, group.ranks):
            own, theirs = socket.socketpair()
            with theirs:
                command = [sys.executable, "-m", module, "--fd", str(theirs.fileno())]
                command += ["--rank", str(rank), "--ranks", str(group.ranks), *arguments]
                with _held_back(STOP_SIGNALS):
                    process = subprocess.Popen(
                        command,
                        env={**os.environ, **group.environment(rank)},
                        pass_fds=[theirs.fileno(), *group.descriptors],
                        stdin=subprocess.DEVNULL,
                    )
            self._processes.append(process)
            self.memory[rank] = RankMemory(pid=process.pid)
            self._wires[rank] = Wire(own)
            self._start(self._listen, rank)
        self._start(self._watch)

    def gather(self, unwanted: threading.Event) -> None:
        """Wait until all are about to join; ends the process where one does not come to that.

        unwanted: is set once nobody wants them any more.

        Raises:
            ShuttingDown: that has been set; the followers are ended.
        """
        joining = 0
        while joining < len(self._wires):
            if unwanted.is_set():
                self.give_up()
                raise ShuttingDown
            with suppress(queue.Empty):
                self._joining.get(timeout=LOOK_S)
                joining += 1
        self._patience.end()

    def meet(self) -> None:
        """Know that all have joined: from now on each has to be heard."""
        self._patience.meet(self._wires)
        _log.info("ranks have met", ranks=self.ranks, followers=[p.pid for p in self._processes])

    def send(self, kind: FrameKind, body: bytes = b"") -> None:
        """Send a frame to all; ends the process where that fails."""
        for rank, wire in self._wires.items():
            try:
                wire.send(kind, body)
            except WireBroken:
                self._lose(rank)

    def begin(self) -> None:
        """Know that a call has begun, which takes no longer than a step may."""
        self._patience.begin(self._step_s)

    def begin_load(self) -> None:
        """Know that a load has begun: each of its steps has a limit."""
        self._refused = False
        self.go_on()

    def go_on(self) -> None:
        """Know that the load has come to its next step."""
        if not self._refused:  # this rank may wait for the one that did, in the middle of its load
            self._patience.begin(config.RANK_LOAD_STEP_S)

    def end(self) -> None:
        """Know that the call, or the load, is over."""
        self._patience.end()

    def agree(self, *, loaded: bool) -> None:
        """Wait until all have loaded, or refused, as this rank has; end the process elsewise."""
        self.begin()
        for _ in self._wires:
            if self._outcomes.get() != loaded:
                self.fail("some ranks loaded and some did not")

    def give_up(self) -> None:
        """End the followers alone: whoever wanted them will say why."""
        self._given_up.set()
        for process in self._processes:
            process.kill()

    def fail(self, reason: str, code: ExitCode = ExitCode.ENGINE_FAILED) -> NoReturn:
        """End all ranks at once: kernels may wait for those that are gone, for ever.

        One that is stopped would not see that its leader has ended.
        """
        with suppress(OSError):  # after a controller's end nobody may read it
            _log.critical("the ranks end", reason=reason)
        self.give_up()
        os._exit(code)

    def fail_call(self, reason: str) -> NoReturn:
        """End all ranks after a call failed here: because another one is gone, or of itself.

        Where sums go through sockets, MLX says so before the system tells who has ended.
        """
        end_s = time.monotonic() + END_SEEN_S / 2
        while time.monotonic() < end_s:
            if any(process.poll() == -signal.SIGKILL for process in self._processes):
                self.fail(reason, ExitCode.RANK_KILLED)
            self._given_up.wait(SEEN_LOOK_S)
        self.fail(reason)

    def _start(self, act: Callable[..., None], *arguments: object) -> None:
        threading.Thread(target=act, args=arguments, name="ranks", daemon=True).start()

    def _listen(self, rank: int) -> None:
        try:
            while True:
                frame = self._wires[rank].receive()
                kind = frame.kind
                self._patience.hear(rank)
                if kind is FrameKind.BEAT and (memory := memory_of(frame)) is not None:
                    self.memory[rank] = memory
                if kind is FrameKind.JOINING:
                    self._joining.put(rank)
                if kind is FrameKind.REFUSED:
                    self._refused = True
                    self.begin()
                if kind in {FrameKind.LOADED, FrameKind.REFUSED}:
                    self._outcomes.put(kind is FrameKind.LOADED)
        except WireBroken:
            if self._given_up.is_set():
                return
            self._lose(rank)

    def _lose(self, rank: int) -> NoReturn:
        """End all because of one whose wire has ended, with a code that says whether by SIGKILL."""
        code = _code_of(self._processes[rank - 1])
        problem = f"rank {rank} is gone" + ("" if code is None else f", exit code {code}")
        killed = code == -signal.SIGKILL
        self.fail(problem, ExitCode.RANK_KILLED if killed else ExitCode.ENGINE_FAILED)

    def _watch(self) -> None:
        while not self._given_up.wait(LOOK_S):
            if problem := self._patience.look(time.monotonic()):
                self.fail(problem)


@contextmanager
def _held_back(numbers: Iterable[signal.Signals]) -> Iterator[None]:
    """Have what is started here begin with signals held back: they are dropped once ignored."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _code_of(process: subprocess.Popen[bytes]) -> int | None:
    """Return the exit code of one whose wire has just ended; None: it lives, as far as one sees."""
    try:
        return process.wait(timeout=END_SEEN_S)
    except subprocess.TimeoutExpired:
        return None
