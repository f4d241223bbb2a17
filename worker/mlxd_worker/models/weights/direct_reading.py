"""Stored tensors read straight into the array that is to hold them, joined and widened on the way.

Tensors that are read one by one are copied once more where they are joined, and once more where
they become wider. Here several threads put the bytes, a piece at a time, to where they end.

Invariants:
- MLX is handed a file that lies nowhere, a header of one tensor and its data. It allocates the
  array, and whoever is asked for the data fills it.
- bfloat16 and float16 become float32, exactly; no other type is changed.
- Beside the array there is what a thread reads at once to widen it; a file is open for one piece
  alone.
- Nothing is raised in MLX's threads: an error is kept for who asked for the tensor.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, Final, cast

import mlx.core as mx

from mlxd_models.files.model_files import file_error, open_regular
from mlxd_models.files.weights import TensorFact
from mlxd_models.fit.parts import Part

PIECE_NBYTES_MIN: Final = 1 << 20
PIECE_NBYTES_MAX: Final = 8 << 20
"""What a thread takes on at a time, as stored: a share of a tensor, within these."""

PAGE_NBYTES: Final = 4096
"""Pieces are whole pages: no value is in two."""

SCRATCH_NBYTES: Final = 1 << 20
"""What is read at once to be widened: it stays in a core's cache until it is."""

STRIPE_NBYTES: Final = 64 << 10
"""Shorter runs of bytes at equal distances are read with what lies between them: disks read ahead,
and other ranks of the machine want the rest."""

STRIPES_AT_ONCE: Final = 512
"""Buffers for these, and for what lies between, are within what a system call takes (1,024)."""

THREADS: Final = 4
"""Also with fewer cores: a disk is the faster the more is asked of it at once."""

WORDS: Final[Mapping[mx.Dtype, str]] = {
    mx.float32: "F32", mx.float16: "F16", mx.bfloat16: "BF16", mx.uint32: "U32", mx.uint8: "U8",
}  # fmt: skip
"""What a type is called in headers."""

_readers: Final = ThreadPoolExecutor(THREADS, thread_name_prefix="mlxd-read")
"""Threads that are made when they are first wanted, and rest between loads."""

_NBYTES: Final = {"F32": 4, "F16": 2, "BF16": 2, "U32": 4, "U8": 1}
_WIDE: Final = "F32"
_BF16_SHIFT: Final = 16


@dataclass(frozen=True, slots=True)
class Stripes:
    """Bytes of a file at equal distances, as many at each place; one stripe is a run of bytes."""

    begin: int
    nbytes: int
    """Those of one."""
    count: int = 1
    step: int = 0
    """From one's first byte to the next one's."""

    @property
    def total_nbytes(self) -> int:
        """Those of all."""
        return self.nbytes * self.count

    def cut(self, nbytes: int) -> Iterator[Stripes]:
        """Yield parts, in order, each within so many bytes of the file or one short stripe.

        Long stripes are cut apart: nothing between them is read.
        """
        if self.count > 1 and self.nbytes < STRIPE_NBYTES:
            many = max(nbytes // self.step, 1)
            for first in range(0, self.count, many):
                count = min(many, self.count - first)
                yield Stripes(self.begin + first * self.step, self.nbytes, count, self.step)
            return
        for at in range(self.count):
            begin = self.begin + at * self.step
            for done in range(0, self.nbytes, nbytes):
                yield Stripes(begin + done, min(nbytes, self.nbytes - done))


@dataclass(frozen=True, slots=True)
class Segment:
    """A tensor's bytes, or those of a part of it."""

    fact: TensorFact
    place: int | None = None
    """One place along the first axis; None: all."""
    part: Part | None = None
    """What is read of that, along an axis of the tensor; None: all."""

    @property
    def nbytes(self) -> int:
        """How many are read."""
        return self.stripes.total_nbytes

    @property
    def stripes(self) -> Stripes:
        """Where in the file they are."""
        fact, part, shape = self.fact, self.part, self.fact.shape
        begin, nbytes, axis = fact.begin, fact.nbytes, 0 if part is None else part.axis
        if self.place is not None:
            nbytes, shape, axis = nbytes // shape[0], shape[1:], axis - 1
            begin += self.place * nbytes
        if part is None:
            return Stripes(begin, nbytes)
        assert axis >= 0, "divided along the axis of which this is one place"
        count = math.prod(shape[:axis])
        step = nbytes // count
        inner = step // shape[axis]
        return Stripes(begin + part.span.start * inner, len(part.span) * inner, count, step)


@dataclass(frozen=True, slots=True)
class _Piece:
    """Some bytes of a tensor, and where they belong."""

    fact: TensorFact
    stripes: Stripes
    into: memoryview


def type_read(stored: Collection[str], wanted: str) -> str | None:
    """Return the type as which tensors of these types are read where `wanted` is what they become.

    None where they cannot be one without rounding.
    """
    if wanted == _WIDE and set(stored) <= {_WIDE, *_WIDENED}:
        return _WIDE
    only = next(iter(stored))
    return only if set(stored) == {only} and only in _NBYTES else None


def read_joined(segments: Sequence[Segment], shape: Sequence[int], *, dtype: str) -> mx.array:
    """Return the segments one after another, as `shape` and `dtype`, evaluated.

    Raises:
        InvalidModel: a file cannot be opened or read; names it and the tensor.
        MachineShort: the machine lacks what that takes; names the file.
    """
    file = _File(segments, shape, dtype)
    try:
        loaded = mx.load(cast("Any", file), format="safetensors")
    except RuntimeError as error:
        raise segments[0].fact.error(f"could not be read: {error}") from error
    file.check()
    return cast("dict[str, mx.array]", loaded)[_File.TENSOR]


class _File:
    """What MLX reads a tensor from: as much of a file object as it asks for."""

    TENSOR: Final = "tensor"
    closed: Final = False

    def __init__(self, segments: Sequence[Segment], shape: Sequence[int], dtype: str) -> None:
        self._segments = segments
        self._width = _NBYTES[dtype]
        stored = sum(segment.nbytes // _NBYTES[segment.fact.dtype] for segment in segments)
        nbytes = stored * self._width
        facts = {"dtype": dtype, "shape": list(shape), "data_offsets": [0, nbytes]}
        text = json.dumps({self.TENSOR: facts}).encode()
        text += b" " * (-len(text) % 8)
        self._head = len(text).to_bytes(8, "little") + text
        self._nbytes = len(self._head) + nbytes
        self._place = 0
        self._failed: BaseException | None = None

    def tell(self) -> int:
        """Return where the next read begins."""
        return self._place

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Let the next read begin elsewhere."""
        bases = {os.SEEK_SET: 0, os.SEEK_CUR: self._place, os.SEEK_END: self._nbytes}
        self._place = bases[whence] + offset
        return self._place

    def readinto(self, buffer: memoryview) -> int:
        """Fill the buffer with a part of the head, or with all of the data."""
        begin, self._place = self._place, self._place + len(buffer)
        if begin < len(self._head):
            buffer[:] = self._head[begin : begin + len(buffer)]
            return len(buffer)
        assert begin == len(self._head), "data are asked for once, all of them"
        assert self._place == self._nbytes, "data are asked for once, all of them"
        try:
            self._fill(buffer)
        except BaseException as error:  # noqa: BLE001 - raised by `check`, in who asked
            self._failed = error
        return len(buffer)

    def check(self) -> None:
        """Raise what went wrong while the data were read."""
        failed, self._failed = self._failed, None
        if failed is not None:
            raise failed

    def _fill(self, buffer: memoryview) -> None:
        pieces: SimpleQueue[_Piece] = SimpleQueue()
        total = sum(segment.nbytes for segment in self._segments)
        piece_nbytes = min(max(total // THREADS, PIECE_NBYTES_MIN), PIECE_NBYTES_MAX)
        piece_nbytes -= piece_nbytes % PAGE_NBYTES
        count = place = 0
        for segment in self._segments:
            width = self._width // _NBYTES[segment.fact.dtype]
            for stripes in segment.stripes.cut(piece_nbytes):
                end = place + stripes.total_nbytes * width
                pieces.put(_Piece(segment.fact, stripes, buffer[place:end]))
                place, count = end, count + 1
        if count == 1:
            _work(pieces)
            return
        futures = [_readers.submit(_work, pieces) for _ in range(min(THREADS, count))]
        # Nobody writes any more when this returns: the buffer may go.
        wait(futures)
        for future in futures:
            future.result()


def _work(pieces: SimpleQueue[_Piece]) -> None:
    """Read pieces until none is left."""
    scratch = memoryview(bytearray())
    while True:
        try:
            piece = pieces.get_nowait()
        except Empty:
            return
        widened = len(piece.into) != piece.stripes.total_nbytes
        if widened and not scratch:
            scratch = memoryview(bytearray(SCRATCH_NBYTES))
        file, name = piece.fact.file, piece.fact.name
        try:
            descriptor = open_regular(str(file), os.O_RDONLY)
        except OSError as error:
            raise file_error(error, file.name, name, doing="could not be opened: ") from error
        try:
            if widened:
                _read_widened(descriptor, piece, scratch)
            else:
                _read_stripes(piece.into, descriptor, piece.stripes)
        except OSError as error:
            raise file_error(error, file.name, name, doing="could not be read: ") from error
        except EOFError as error:
            raise piece.fact.error(f"could not be read: {error}") from error
        finally:
            os.close(descriptor)


def read_into(into: memoryview, descriptor: int, begin: int) -> None:
    """Fill a buffer with a file's bytes from `begin` on; raises EOFError if it ends before."""
    done = 0
    while done < len(into):
        count = os.preadv(descriptor, [into[done:]], begin + done)
        if count == 0:
            message = "its file ends before it does"
            raise EOFError(message)
        done += count


def _read_stripes(into: memoryview, descriptor: int, stripes: Stripes) -> None:
    """Fill a buffer with stripes, one behind the other; raises as `read_into`.

    Short ones are read together with what lies between them, which a system call puts elsewhere.
    """
    size = stripes.nbytes
    if stripes.count == 1:
        read_into(into, descriptor, stripes.begin)
        return
    between = memoryview(bytearray(stripes.step - size))
    for first in range(0, stripes.count, STRIPES_AT_ONCE):
        places = range(first, min(first + STRIPES_AT_ONCE, stripes.count))
        buffers: list[memoryview] = []
        for at in places:
            buffers += (into[at * size : (at + 1) * size], between)
        del buffers[-1]
        wanted = (len(places) - 1) * stripes.step + size
        if os.preadv(descriptor, buffers, stripes.begin + first * stripes.step) == wanted:
            continue
        for at in places:
            stripe = into[at * size : (at + 1) * size]
            read_into(stripe, descriptor, stripes.begin + at * stripes.step)


def _read_widened(descriptor: int, piece: _Piece, scratch: memoryview) -> None:
    widen, width = _WIDENED[piece.fact.dtype], len(piece.into) // piece.stripes.total_nbytes
    done = 0
    for stripes in piece.stripes.cut(SCRATCH_NBYTES):
        stored = scratch[: stripes.total_nbytes]
        _read_stripes(stored, descriptor, stripes)
        end = done + len(stored) * width
        widen(stored, piece.into[done:end])
        done = end


def _widen_bfloat16(stored: memoryview, into: memoryview) -> None:
    import numpy as np  # noqa: PLC0415 - 11 MB that only who widens needs: `fit.WIDENING_BYTES`

    # A bfloat16 is the upper half of the float32 that it equals.
    values = np.frombuffer(into, dtype=np.uint32)
    values[...] = np.frombuffer(stored, dtype=np.uint16)
    values <<= np.uint32(_BF16_SHIFT)


def _widen_float16(stored: memoryview, into: memoryview) -> None:
    import numpy as np  # noqa: PLC0415 - as above

    np.frombuffer(into, dtype=np.float32)[...] = np.frombuffer(stored, dtype=np.float16)


_WIDENED: Final[Mapping[str, Callable[[memoryview, memoryview], None]]] = {
    "BF16": _widen_bfloat16,
    "F16": _widen_float16,
}
