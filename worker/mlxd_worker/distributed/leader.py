"""The first rank: it alone is asked and answers, and has the others do what its own host does.

The ranks are one state machine, replicated: equal calls and equal readings leave equal states, and
so the same tokens are drawn everywhere, from equal logits.

Invariants:
- A call goes to the followers before it is made here, and each reading of the clock, of memory or
  of masks in it when it is made. What is read between calls is nobody else's.
- Whatever fails here and is no refusal ends the group, as a follower that fails does (`followers`).
- A load that is given up goes on to its end, because the others load as well, and is undone then.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Final

from mlxd_shared import config
from mlxd_shared.domain.devices import DeviceKind
from mlxd_shared.domain.errors import (
    BackendProblem,
    InvalidRequest,
    LoadAbandoned,
    MlxdError,
    ShuttingDown,
)
from mlxd_shared.domain.figures import LoadProgress, RankMemory
from mlxd_worker.distributed.checks import mark_of
from mlxd_worker.distributed.followers import Followers
from mlxd_worker.distributed.frames import (
    WHOLE_MAX,
    FrameKind,
    pack_load,
    pack_real,
    pack_submit,
    pack_whole,
)
from mlxd_worker.distributed.group import Group, join_group
from mlxd_worker.distributed.masks import SentMasks
from mlxd_worker.engine.request import Cancel, Failed, Submit
from mlxd_worker.thread.facts import Loaded, LoadJob, Report
from mlxd_worker.thread.host import ModelHost, rank_memory
from mlxd_worker.thread.readings import LOCAL

FOLLOWER: Final = "mlxd_worker.distributed"


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
            value //= self._followers.ranks
        return self._send(value)

    def make_masks(self, threads: int) -> SentMasks:
        """Return threads that make them, of what each step sees of which the followers know."""
        return SentMasks(threads, partial(self._followers.send, FrameKind.MASKS))

    def _send(self, value: int) -> int:
        if self.sends:
            self._followers.send(FrameKind.NBYTES, pack_whole(value))
        return value


class LeaderHost(ModelHost):
    """The first rank's host: what it does, the followers' hosts do."""

    def __init__(
        self,
        device: DeviceKind,
        *,
        group: Group,
        module: str = FOLLOWER,
        arguments: Sequence[str] = (),
        unwanted: threading.Event | None = None,
    ) -> None:
        """Start the followers and meet them; this process's environment says that it is rank 0.

        module: what followers run. arguments: further ones of their command line. unwanted: is set
        once nobody wants the ranks any more; that counts until all are about to join.

        Raises:
            BackendProblem: the ranks do not meet.
            ShuttingDown: they are unwanted.
        """
        self._followers = Followers(group, module, arguments)
        self._followers.gather(unwanted or threading.Event())
        try:
            share = join_group(0, group.ranks, device)
        except BackendProblem:
            self._followers.give_up()
            raise
        self._followers.meet()
        self._sent = SentReadings(self._followers)
        self._steps = 0
        self._others = range(1, group.ranks)
        super().__init__(device=device, share=share, readings=self._sent)

    def load(self, job: LoadJob, report: Report) -> Loaded:
        """Load on all ranks; raises as `ModelHost.load`, after all have."""
        given_up: list[LoadAbandoned] = []

        def go_on(progress: LoadProgress) -> None:
            self._followers.go_on()
            try:
                report(progress)
            except LoadAbandoned as error:
                given_up.append(error)

        with self._call(FrameKind.LOAD, pack_load(job)):
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
        target_nbytes = min(target_nbytes, WHOLE_MAX)  # nobody holds more: all of it may stay
        with self._call(FrameKind.SHRINK, pack_whole(target_nbytes)):
            return super().shrink(target_nbytes)

    def submit(self, request: Submit) -> None:
        """Hand a stream to all engines; one that is too long a frame fails."""
        body = pack_submit(request)
        if len(body) > config.RANK_FRAME_BYTES_MAX:
            limit = f"the ranks of a model send each other at most {config.RANK_FRAME_BYTES_MAX}"
            problem = InvalidRequest.of("prompt", f"{len(body)} bytes with all options: {limit}")
            request.sink.put(Failed(problem))
            return
        with self._call(FrameKind.SUBMIT, body):
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

    def leave(self) -> None:
        """End the followers: the kernel would, because this thread made them, and look a fault."""
        self._followers.give_up()

    def ranks(self) -> tuple[RankMemory, ...]:
        """Return what each rank holds: this one now, the others when they last said so."""
        memory = self._followers.memory
        return (rank_memory(), *(memory.get(rank, RankMemory()) for rank in self._others))

    @contextmanager
    def _call(self, kind: FrameKind, body: bytes = b"") -> Iterator[None]:
        """Make a call on all ranks; calls in it are a part of it."""
        if self._sent.sends:
            yield
            return
        if kind is FrameKind.LOAD:
            self._followers.begin_load()
        else:
            self._followers.begin()
        self._followers.send(kind, body)
        self._sent.sends = True
        try:
            yield
        except MlxdError:
            raise
        except BaseException as error:  # noqa: BLE001 - the others may wait for this rank
            self._followers.fail_call(f"{kind.name}: {error!r}")
        finally:
            self._sent.sends = False
            self._followers.end()
