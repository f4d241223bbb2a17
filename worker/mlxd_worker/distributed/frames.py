"""What a leader and its followers say to each other: typed frames of bounded length.

Invariants:
- A frame is its kind (1 byte), the length of what follows (4 bytes, big-endian) and that. Readings
  are 8 bytes, masks as `masks` packs them; all else is JSON, from which values are made field by
  field, never objects by name.
- A frame that is longer than `RANK_FRAME_BYTES_MAX`, or of an unknown kind, ends the group.
"""

from __future__ import annotations

import json
import socket
import struct
import threading
from dataclasses import fields
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from mlxd_shared import config
from mlxd_shared.domain.figures import RankMemory
from mlxd_shared.domain.requests import (
    KVFormat,
    LoadSpec,
    Pooling,
    Sampling,
    SamplingOptions,
    Weights,
)
from mlxd_worker.distributed.formats import constraint_of, constraint_values
from mlxd_worker.engine.request import Event, Sink, StreamId, Submit, Tell
from mlxd_worker.thread.facts import LoadJob

if TYPE_CHECKING:
    from mlxd_worker.constraints.compiler import Constraints

_HEAD: Final = struct.Struct(">BI")
_REAL: Final = struct.Struct(">d")
_WHOLE: Final = struct.Struct(">q")
_MEMORY: Final = struct.Struct(">5q")
WHOLE_MAX: Final = (1 << 63) - 1
"""The largest number that a frame has room for."""


class FrameKind(IntEnum):
    """What a frame says; from the leader but for the last four. A BEAT has what its rank holds."""

    LOAD = 1
    SUBMIT = 2
    CANCEL = 3
    STEP = 4
    REST = 5
    END_STREAMS = 6
    SHRINK = 7
    UNLOAD = 8
    CLOCK = 9
    NBYTES = 10
    CHECK = 11
    MASKS = 12
    BEAT = 13
    LOADED = 14
    REFUSED = 15
    JOINING = 16


class WireBroken(Exception):
    """The other side is gone, or says what is no frame."""


class Frame(NamedTuple):
    """One message."""

    kind: FrameKind
    body: bytes = b""

    def json(self) -> Any:  # noqa: ANN401 - JSON
        """Return the body as values."""
        return json.loads(self.body)


class Wire:
    """Frames over a connected socket; any thread may send, one receives."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._reading = connection.makefile("rb")
        self._sending = threading.Lock()

    def send(self, kind: FrameKind, body: bytes = b"") -> None:
        """Send one frame.

        Raises:
            WireBroken: nobody is there, or the frame is too long.
        """
        if len(body) > config.RANK_FRAME_BYTES_MAX:
            limit = f"{config.RANK_FRAME_BYTES_MAX} bytes"
            raise WireBroken(f"{kind.name}: {len(body)} bytes are beyond {limit}")
        try:
            with self._sending:
                self._connection.sendall(_HEAD.pack(kind, len(body)) + body)
        except OSError as error:
            raise WireBroken(f"{kind.name}: {error}") from error

    def receive(self) -> Frame:
        """Return the next frame; raises WireBroken if there will be none."""
        number, length = _HEAD.unpack(self._exactly(_HEAD.size))
        if length > config.RANK_FRAME_BYTES_MAX or number not in set(FrameKind):
            raise WireBroken(f"a frame of kind {number} and {length} bytes")
        return Frame(FrameKind(number), self._exactly(length))

    def _exactly(self, count: int) -> bytes:
        try:
            read = self._reading.read(count)
        except OSError as error:
            raise WireBroken(str(error)) from error
        if len(read) < count:
            raise WireBroken("the other side is gone")
        return read


def pack_real(value: float) -> bytes:
    """Return a clock's reading as a body."""
    return _REAL.pack(value)


def real_of(frame: Frame) -> float:
    """Return the reading of a CLOCK."""
    return float(_REAL.unpack(frame.body)[0])


def pack_whole(value: int) -> bytes:
    """Return a number of bytes, or of a stream, as a body; at most `WHOLE_MAX`."""
    return _WHOLE.pack(value)


def whole_of(frame: Frame) -> int:
    """Return the number that a frame consists of."""
    return int(_WHOLE.unpack(frame.body)[0])


def pack_memory(memory: RankMemory) -> bytes:
    """Return what a rank holds, but for its device's name, as a body."""
    return _MEMORY.pack(
        memory.pid,
        memory.mlx_active_nbytes,
        memory.mlx_cache_nbytes,
        memory.mlx_peak_nbytes,
        memory.resident_nbytes,
    )


def memory_of(frame: Frame) -> RankMemory | None:
    """Return what a BEAT says that its rank holds; None: it has no MLX yet.

    Raises:
        WireBroken: it says something else.
    """
    if not frame.body:
        return None
    if len(frame.body) != _MEMORY.size:
        raise WireBroken(f"{frame.kind.name}: {len(frame.body)} bytes")
    return RankMemory("", *_MEMORY.unpack(frame.body))


class Deaf(Sink):
    """A sink for what followers generate: only the leader answers."""

    def put(self, event: Event) -> None:
        """Forget the event."""

    def owe(self, tell: Tell) -> None:
        """Never ask: a text that cannot be written would end a row here that the leader steps."""


_ABSENT: Final = {"sink", "constraint", "images", "keys"}
"""What no follower gets as it is: the leader answers, constraints have values of their own
(`formats`), and models that see have no ranks."""


def pack_submit(request: Submit) -> bytes:
    """Return a stream as a body."""
    assert not request.images, "refused before"
    values = {f.name: getattr(request, f.name) for f in fields(request) if f.name not in _ABSENT}
    its = values["sampling"]
    values["sampling"] = {f.name: getattr(its, f.name) for f in fields(its)}
    for name in ("stop_token_ids", "eos_ids"):
        values[name] = sorted(values[name])
    values["pooling"] = None if request.pooling is None else request.pooling.value
    values["shown"] = list(request.shown.items())
    values["constraint"] = constraint_values(request.constraint)
    return json.dumps(values).encode()


def submit_of(frame: Frame, formats: Constraints | None) -> Submit:
    """Return the stream of a SUBMIT, with a sink that forgets.

    formats: of the model that is here, if any.
    """
    values = frame.json()
    values["sampling"] = _sampling(Sampling, values["sampling"])
    for name in ("prompt", "stop", "forced"):
        values[name] = tuple(values[name])
    for name in ("stop_token_ids", "eos_ids"):
        values[name] = frozenset(values[name])
    values["stream"] = StreamId(values["stream"])
    values["pooling"] = None if values["pooling"] is None else Pooling(values["pooling"])
    values["shown"] = {int(token): text for token, text in values["shown"]}
    values["constraint"] = constraint_of(values["constraint"], formats)
    return Submit(**values, sink=Deaf())


def pack_load(job: LoadJob) -> bytes:
    """Return a load as a body."""
    spec = {f.name: getattr(job.spec, f.name) for f in fields(job.spec)}
    its = job.spec.sampling
    spec["sampling"] = {f.name: getattr(its, f.name) for f in fields(its)}
    spec["weights"] = job.spec.weights.value
    spec["kv_format"] = None if job.spec.kv_format is None else job.spec.kv_format.value
    values = {"path": str(job.path), "name": job.name, "digest": job.digest, "spec": spec}
    return json.dumps(values).encode()


def load_of(frame: Frame) -> LoadJob:
    """Return the load of a LOAD."""
    values = frame.json()
    spec = values["spec"]
    spec["sampling"] = _sampling(SamplingOptions, spec["sampling"])
    spec["weights"] = Weights(spec["weights"])
    spec["kv_format"] = None if spec["kv_format"] is None else KVFormat(spec["kv_format"])
    return LoadJob(Path(values["path"]), values["name"], values["digest"], LoadSpec(**spec))


def _sampling(kind: type[Any], values: dict[str, Any]) -> Any:  # noqa: ANN401 - one of two
    biases = tuple((int(token), bias) for token, bias in values["logit_bias"])
    return kind(**(values | {"logit_bias": biases}))
