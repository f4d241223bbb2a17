"""Tensors of a checkpoint by name: read straight away, or lazily when they are evaluated.

Invariants:
- A file is opened when one of its tensors is first wanted, and let go of with the last: a store may
  keep one file for each tensor.
- Each tensor is taken once. One that was taken is referred to by nobody here.
- What the system has against a file is learnt by doing the same again, without MLX. The machine's
  own trouble, such as want of open files or a disk that fails, is never said of the model. Where
  nothing is wrong any more, MLX's word stands.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import mlx.core as mx

from mlxd_models.families.common.packing import BYTE_DTYPE, FP8_DTYPE
from mlxd_models.files.model_files import file_error, open_regular
from mlxd_models.files.weights import TensorFact, read_header
from mlxd_models.fit.parts import Part
from mlxd_shared.domain.errors import InvalidModel, MlxdError
from mlxd_worker.models.weights.direct_reading import (
    SCRATCH_NBYTES,
    Segment,
    read_into,
    read_joined,
    type_read,
)

Slab = tuple[str, int | None]
"""A tensor, or one place of it along its first axis."""

Made = tuple[str, Callable[[mx.array], mx.array]]
"""A stored tensor's name, and what makes another one of it, lazily."""


class LazyTensors(Collection[str]):
    """Stored tensors, and what was made of them, by the names that they go by here."""

    def __init__(
        self, facts: Iterable[TensorFact], parts: Mapping[str, Part] = MappingProxyType({})
    ) -> None:
        """Know the tensors; nothing is opened yet.

        parts: what is taken of those that are not taken whole, by name.
        """
        self._facts = {fact.name: fact for fact in facts}
        self._parts = parts
        self._left = set(self._facts)
        self._made: dict[str, Made] = {}
        self._sources: dict[str, mx.array] = {}
        self._opened: dict[Path, dict[str, mx.array]] = {}
        self._arrays: dict[str, mx.array] = {}
        self._by_file: dict[Path, list[TensorFact]] = {}
        for fact in self._facts.values():
            self._by_file.setdefault(fact.file, []).append(fact)
        self._checked: set[Path] = set()

    def __contains__(self, name: object) -> bool:
        return name in self._left or name in self._made or name in self._arrays

    def __iter__(self) -> Iterator[str]:
        yield from self._left
        yield from self._made
        yield from self._arrays

    def __len__(self) -> int:
        return len(self._left) + len(self._made) + len(self._arrays)

    def pop(self, name: str) -> mx.array:
        """Take a tensor: lazy, unless it is a part, or made of one, of which no more is read.

        Raises:
            InvalidModel: its file cannot be opened, or is not the one whose header was read.
            MachineShort: the machine lacks what it takes to open it.
        """
        if name in self._arrays:
            return self._arrays.pop(name)
        if name in self._made:
            return self._make(name)
        array = self._open_stored(self._facts[name])
        self._let_go(name)
        return array

    def derive(self, made: Mapping[str, Made]) -> None:
        """Let these be taken in place of stored tensors, each made of one when it is taken.

        A stored one goes with the last that is made of it.
        """
        self._left.difference_update(source for source, _ in made.values())
        self._made |= made

    def _make(self, name: str) -> mx.array:
        source, make = self._made.pop(name)
        array = self._sources.pop(source, None)
        if array is None:
            array = self._open_stored(self._facts[source])
            self._close(self._facts[source])
        if any(other == source for other, _ in self._made.values()):
            self._sources[source] = array
        return make(array)

    def _open_stored(self, fact: TensorFact) -> mx.array:
        self._check_unchanged(fact.file)
        part = self._parts.get(fact.name)
        if part is not None:
            as_bytes = fact.dtype == FP8_DTYPE  # as MLX loads these
            plain = replace(fact, dtype=BYTE_DTYPE) if as_bytes else fact
            segment = Segment(plain, part=part)
            return read_joined([segment], part.of(fact.shape), dtype=plain.dtype)
        if fact.file not in self._opened:
            self._opened[fact.file] = dict(_open(fact.file))
        return self._opened[fact.file][fact.stored_name]

    def read(self, slabs: Sequence[Slab], shape: Sequence[int], *, dtype: str) -> mx.array | None:
        """Take tensors as one, evaluated, whose bytes are those of the slabs one after another.

        What is not among the slabs is nobody's. dtype: by the headers' word, what the caller makes
        of it; it is read as that where that is exact. None, and nothing is taken, where a tensor is
        made here, or their types cannot be one.

        Raises:
            InvalidModel: a file cannot be opened or read.
            MachineShort: the machine lacks what that takes.
        """
        names = dict.fromkeys(name for name, _ in slabs)
        if not self._left.issuperset(names):
            return None
        read_as = type_read({self._facts[name].dtype for name in names}, dtype)
        if read_as is None:
            return None
        for file in {self._facts[name].file for name in names}:
            self._check_unchanged(file)
        segments = [Segment(self._facts[n], place, self._parts.get(n)) for n, place in slabs]
        array = read_joined(segments, shape, dtype=read_as)
        for name in names:
            self._let_go(name)
        return array

    def reopen(self, name: str) -> mx.array:
        """Return a stored tensor from an opening of its own; it is not taken."""
        fact = self._facts[name]
        return _open(fact.file)[fact.stored_name]

    def put(self, arrays: Mapping[str, mx.array]) -> None:
        """Let these be taken, made of what was."""
        self._arrays |= arrays

    def discard(self, name: str) -> None:
        """Let nobody take a tensor."""
        self._left.discard(name)

    def _check_unchanged(self, file: Path) -> None:
        """Refuse a file that was replaced since its header was read: other bytes lie there now."""
        if file in self._checked:
            return
        now = {fact.stored_name: _place(fact) for fact in read_header(file)}
        moved = [fact for fact in self._by_file[file] if now.get(fact.stored_name) != _place(fact)]
        if moved:
            # A tensor that is another, or gone, moves those behind it: it is the one to name.
            first = min(
                moved, key=lambda fact: now.get(fact.stored_name, ())[:2] == _place(fact)[:2]
            )
            problem = "not there any more as its header said: the file has changed"
            raise first.error(problem, field=first.stored_name)
        self._checked.add(file)

    def _let_go(self, name: str) -> None:
        self._left.remove(name)
        self._close(self._facts[name])

    def _close(self, fact: TensorFact) -> None:
        """Let go of a stored tensor, and with the last of its file's of that."""
        arrays = self._opened.get(fact.file, {})
        arrays.pop(fact.stored_name, None)
        if not arrays:
            self._opened.pop(fact.file, None)

    def clear(self) -> None:
        """Let go of everything."""
        self._left.clear()
        self._made.clear()
        self._sources.clear()
        self._opened.clear()
        self._arrays.clear()


def _place(fact: TensorFact) -> tuple[str, tuple[int, ...], int]:
    return fact.dtype, fact.shape, fact.begin


def _open(file: Path) -> Mapping[str, mx.array]:
    try:
        loaded = mx.load(str(file), format="safetensors")
    except (RuntimeError, ValueError) as error:
        raise why_not_opened(file, error) from error
    assert isinstance(loaded, dict)
    return loaded


def why_not_opened(file: Path, error: Exception) -> MlxdError:
    """Return why MLX could not open a file, or understand its header."""
    doing = "could not be opened: "
    try:
        os.close(open_regular(str(file), os.O_RDONLY))
    except OSError as trouble:
        return file_error(trouble, file.name, doing=doing)
    reason = str(error).replace(str(file), file.name)  # the path is not shown
    return InvalidModel(f"{doing}{reason}", file=file.name)


def why_not_read(facts: Iterable[TensorFact], error: Exception, field: str = "") -> MlxdError:
    """Return why MLX could not read one of these tensors.

    field: what an error of MLX's own is said of; empty: the first of them, and its file.
    """
    doing, first = "could not be read: ", None
    for fact in facts:
        first = first or fact
        try:
            _read_through(fact)
        except OSError as trouble:
            return file_error(trouble, fact.file.name, fact.name, doing=doing)
        except EOFError:
            first = fact
            break
    if field or first is None:
        return InvalidModel(f"{doing}{error}", field=field)
    return first.error(f"{doing}{error}")


def _read_through(fact: TensorFact) -> None:
    """Read a tensor, and forget it; raises OSError, or EOFError if its file ends before it does."""
    descriptor = open_regular(str(fact.file), os.O_RDONLY)
    try:
        scratch = memoryview(bytearray(min(SCRATCH_NBYTES, fact.nbytes)))
        for done in range(0, fact.nbytes, SCRATCH_NBYTES):
            read_into(scratch[: fact.nbytes - done], descriptor, fact.begin + done)
    finally:
        os.close(descriptor)
