"""A rank that follows: it makes the leader's calls on its own host, with the leader's readings.

Invariants:
- It decides nothing, answers nobody, reads no clock and follows no grammar: what it needs comes
  from the wire in the order in which the leader made use of it.
- A thread beats for as long as the process runs; a step that stands still is the leader's to see.
- It ends at once with its leader, and when it fails: the group does not outlive a rank.
"""

from __future__ import annotations

import asyncio
import gc
import os
import queue
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Final, NoReturn

from mlxd_shared import config
from mlxd_shared.domain.devices import DeviceKind
from mlxd_shared.domain.errors import MlxdError, ShuttingDown
from mlxd_shared.domain.figures import RankMemory
from mlxd_shared.ops.heap import keep_heap_trimmed
from mlxd_shared.ops.logs import get_logger
from mlxd_worker.distributed.checks import mark_of
from mlxd_worker.distributed.frames import (
    Frame,
    FrameKind,
    Wire,
    WireBroken,
    load_of,
    pack_memory,
    real_of,
    submit_of,
    whole_of,
)
from mlxd_worker.distributed.group import join_group
from mlxd_worker.distributed.masks import HeardMasks
from mlxd_worker.engine.request import Cancel, StreamId
from mlxd_worker.process.exit_code import ExitCode

if TYPE_CHECKING:  # MLX comes after its environment
    from mlxd_worker.thread.host import ModelHost

_log = get_logger("ranks")


class Differs(Exception):
    """A rank is not where the leader is."""


class Calls:
    """The leader's frames in their order; also where a follower's readings come from."""

    def __init__(self, wire: Wire) -> None:
        """Listen on a thread of its own, which ends the process when the leader is gone."""
        self._wire = wire
        self._frames: queue.SimpleQueue[Frame] = queue.SimpleQueue()
        self._over = threading.Event()
        self.measure: Callable[[], RankMemory] | None = None
        """Returns what this rank holds; None before MLX is there."""
        threading.Thread(target=self._listen, name="leader", daemon=True).start()
        threading.Thread(target=self._beat, name="beat", daemon=True).start()

    def next(self) -> Frame:
        """Wait for the next frame."""
        return self._frames.get()

    def answer(self, kind: FrameKind) -> None:
        """Tell the leader."""
        self._wire.send(kind)

    def beat(self) -> None:
        """Tell the leader that this rank lives, and what it holds; raises WireBroken."""
        measure = self.measure
        self._wire.send(FrameKind.BEAT, b"" if measure is None else pack_memory(measure()))

    def now_s(self) -> float:
        """Return the leader's clock, as it read it here."""
        return real_of(self._expect(FrameKind.CLOCK))

    def held_nbytes(self) -> int:
        """Return what MLX held on the leader."""
        return whole_of(self._expect(FrameKind.NBYTES))

    def available_nbytes(self, kind: DeviceKind) -> int:
        """Return what a rank may take, as the leader has it."""
        del kind  # all ranks are of one
        return whole_of(self._expect(FrameKind.NBYTES))

    def make_masks(self, threads: int) -> HeardMasks:
        """Return what has the leader's masks."""
        del threads  # they are the leader's
        return HeardMasks(lambda: self._expect(FrameKind.MASKS).body)

    def _expect(self, kind: FrameKind) -> Frame:
        frame = self.next()
        if frame.kind is not kind:
            raise Differs(f"it wants a {kind.name}, the leader says {frame.kind.name}")
        return frame

    def _listen(self) -> None:
        try:
            while True:
                self._frames.put(self._wire.receive())
        except WireBroken as error:
            self._over.set()
            _end(f"the leader: {error}")
        except Exception as error:  # noqa: BLE001 - no memory for a frame: nobody would miss it
            _end(repr(error))

    def _beat(self) -> None:
        try:
            while not self._over.wait(config.RANK_BEAT_S):
                self.beat()
        except WireBroken as error:
            _end(f"the leader: {error}")
        except Exception as error:  # noqa: BLE001 - no memory to measure with, say
            _end(repr(error))


def follow(wire: Wire, *, rank: int, ranks: int, device: DeviceKind) -> NoReturn:
    """Meet the other ranks and follow until the process ends; imports MLX."""
    calls = Calls(wire)
    try:
        # MLX comes after its environment.
        from mlxd_worker.thread.host import ModelHost, rank_memory  # noqa: PLC0415

        gc.freeze()  # what was imported stays: a full collection would keep all ranks waiting
        calls.answer(FrameKind.JOINING)
        share = join_group(rank, ranks, device)
        host = ModelHost(device=device, share=share, readings=calls)
        calls.measure = rank_memory
        threading.Thread(target=_trim, args=(host,), name="heap", daemon=True).start()
        while True:
            _perform(host, calls)
    except BaseException as error:  # noqa: BLE001 - whatever it is, the group ends
        _log.critical("a rank failed", rank=rank, exc_info=error)
        _end(repr(error))


def _trim(host: ModelHost) -> None:
    asyncio.run(keep_heap_trimmed(idle=lambda: not host.busy))


def _perform(host: ModelHost, calls: Calls) -> None:
    frame = calls.next()
    if frame.kind is FrameKind.LOAD:
        loaded = _loads(host, frame)
        calls.beat()
        calls.answer(FrameKind.LOADED if loaded else FrameKind.REFUSED)
        return
    if frame.kind not in _CALLS:
        raise Differs(f"no call begins with {frame.kind.name}")
    _CALLS[frame.kind](host, frame)


def _loads(host: ModelHost, frame: Frame) -> bool:
    try:
        host.load(load_of(frame), lambda _: None)
    except MlxdError as error:
        _log.warning("a rank refused the model", reason=error.describe())
        return False
    formats = host.formats
    if formats is not None and formats.are_served:
        formats.learn_spellings()  # no stream's first call has the others wait for that
    return True


def _check(host: ModelHost, frame: Frame) -> None:
    if mark_of(host.marks()) != frame.body:
        raise Differs(f"its state is another than the leader's: {host.marks()}")


_CALLS: Final[Mapping[FrameKind, Callable[[ModelHost, Frame], object]]] = {
    FrameKind.SUBMIT: lambda host, frame: host.submit(submit_of(frame, host.formats)),
    FrameKind.CANCEL: lambda host, frame: host.cancel(Cancel(StreamId(whole_of(frame)))),
    FrameKind.STEP: lambda host, _: host.step(),
    FrameKind.REST: lambda host, _: host.rest(),
    FrameKind.END_STREAMS: lambda host, _: host.end_streams(ShuttingDown()),
    FrameKind.SHRINK: lambda host, frame: host.shrink(whole_of(frame)),
    FrameKind.UNLOAD: lambda host, _: host.unload(ShuttingDown()),
    FrameKind.CHECK: _check,
}
"""What the leader's calls are here; a load has an answer."""


def _end(reason: str) -> NoReturn:
    with suppress(OSError):  # after a controller's end nobody may read it
        _log.info("a rank ends", reason=reason)
    os._exit(ExitCode.ENGINE_FAILED)
