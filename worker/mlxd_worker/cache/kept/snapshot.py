"""Snapshots: what all layers of one kind hold of one row, kept beyond the row's next write.

Invariants:
- A lazy snapshot is a range of a row's positions and owns nothing; what it names stands in the
  row's arenas, untouched: whoever is about to write there has it copied out first, and so has
  whoever frees the row. It can be read, for any row, and stays lazy.
- An owned snapshot owns compact arrays (`stacks`), evaluated or under way, never a view: a view
  would keep the whole arena, or the whole of what was split, alive. `nbytes` is what closing it
  gives back.
- Sliceable kinds keep [start, stop), positions along `POSITION_AXIS`; whole-state kinds keep the
  state at `stop`, and are owned from the start.
- Each snapshot ends exactly once: closed, or used up by `split` or `merge`. The book knows all open
  ones; a second end is an error.
"""

from collections.abc import Callable, Mapping, Sequence

import mlx.core as mx

from mlxd_worker.cache.base import Kind, RowId
from mlxd_worker.cache.changes import in_parts, wait
from mlxd_worker.cache.kept.stacks import (
    LayerState,
    Stack,
    compact,
    concatenate,
    layers_of,
    nbytes_of,
    take_pairs,
)
from mlxd_worker.kernels.device import runs_cpu

ReadRow = Callable[[RowId, Kind, int, int], tuple[Stack, ...]]
"""Reads positions [start, stop) of a row from all layers of a kind: lazy, compact copies."""


class SnapshotError(Exception):
    """A bug of the caller: a snapshot used after its end, or two merged that are not adjacent."""


class Snapshot:
    """All layers of one kind for one row. Made by a `SnapshotBook`; engine thread only."""

    __slots__ = ("_book", "ident", "kind", "on_materialise", "owned", "row", "start", "stop")

    def __init__(
        self,
        book: "SnapshotBook",
        ident: int,
        kind: Kind,
        start: int,
        stop: int,
        *,
        row: RowId | None = None,
        stacks: tuple[Stack, ...] | None = None,
    ) -> None:
        """Make an open snapshot, lazy with a `row` or owned with `stacks`; the book's affair."""
        self.ident = ident
        self.kind = kind
        self.start = start
        self.stop = stop
        self.on_materialise: Callable[[int], None] | None = None
        """Called with the bytes by which `nbytes` grew when a lazy snapshot has been copied out."""
        self._book = book
        self.row = row
        """The row whose arenas hold what a lazy snapshot names; None for any other."""
        self.owned = stacks
        """What it owns of the kind's layers, in order; None while lazy and after the end."""

    @property
    def lazy(self) -> bool:
        """Whether the snapshot names a row's positions and owns nothing."""
        return self.row is not None

    @property
    def closed(self) -> bool:
        """Whether the snapshot has ended."""
        return self.row is None and self.owned is None

    @property
    def stacks(self) -> tuple[Stack, ...]:
        """The owned arrays, none while lazy. Do not keep them."""
        return self.owned or ()

    @property
    def layers(self) -> tuple[LayerState, ...]:
        """What is owned by layer, none while lazy: arrays or views. Do not keep them."""
        return layers_of(self.stacks)

    @property
    def nbytes(self) -> int:
        """The bytes owned: 0 while lazy and after the end."""
        return sum(map(nbytes_of, self.stacks))

    def read(self) -> tuple[LayerState, ...]:
        """Return each layer's state, in the order of the kind's layers.

        An owned snapshot's own arrays or views of them, which the caller must not keep; of a lazy
        one copies that are not evaluated yet: evaluate them before anything is written.

        Raises:
            SnapshotError: the snapshot has ended.
        """
        return layers_of(self.read_stacks())

    def read_stacks(self) -> tuple[Stack, ...]:
        """Return what `read` does, as it is stacked.

        Raises:
            SnapshotError: the snapshot has ended.
        """
        self.check_open()
        if self.row is None:
            return self.stacks
        return self._book.read_row(self.row, self.kind, self.start, self.stop)

    def split(self, at: int) -> "tuple[Snapshot | None, Snapshot | None]":
        """Return what lies before `at` and what lies from there on.

        Where everything lies on one side it is the snapshot itself, hook and all; a whole-state
        kind's is always on the right. Otherwise it ends, and two without hooks take its place: lazy
        ones of a lazy one, and of an owned one two that own compact memory each.

        Raises:
            SnapshotError: the snapshot has ended.
        """
        self.check_open()
        if not self.kind.sliceable or at <= self.start:
            return None, self
        if at >= self.stop:
            return self, None
        return self._book.split(self, at)

    def close(self) -> None:
        """End the snapshot and release what it owns.

        Raises:
            SnapshotError: the snapshot has ended already.
        """
        self._book.end(self)

    def check_open(self) -> None:
        """Do nothing.

        Raises:
            SnapshotError: the snapshot has ended.
        """
        if self.closed:
            raise SnapshotError(f"{self} has ended already")

    def __repr__(self) -> str:
        state = "lazy" if self.lazy else "closed" if self.closed else "owned"
        return f"<{state} {self.kind} snapshot {self.ident} of [{self.start}, {self.stop})>"


def allocate_exactly() -> None:
    """Let the copies made next, which are to be kept, take no more memory than their size.

    MLX's pool serves a request with a buffer up to twice as large, or two pages larger; what is
    over would belong to nobody for as long as the copy lives. On a CPU, where the ledger is exact,
    the pool (of 32 MB at most) is emptied.
    """
    if runs_cpu():
        mx.clear_cache()


class SnapshotBook:
    """All open snapshots of one worker. One owner: the engine thread."""

    def __init__(self, read_row: ReadRow, *, waits: bool = True) -> None:
        """Return an empty book; `read_row` reads what lazy snapshots name.

        waits: for what is cut and joined; else it goes behind what is under way.
        """
        self._finish: Callable[[object], None] = wait if waits else _dispatch
        self.read_row = read_row
        self._open: dict[int, Snapshot] = {}
        self._lazy: dict[RowId, dict[int, Snapshot]] = {}
        self._next_ident = 0
        self._nbytes = 0
        self._arrays = 0

    @property
    def live(self) -> int:
        """How many snapshots have not ended."""
        return len(self._open)

    @property
    def nbytes(self) -> int:
        """The bytes that open snapshots own."""
        return self._nbytes

    def tally(self) -> tuple[int, int]:
        """Return bytes and number of what `arrays` names; at once, however many there are."""
        return self._nbytes, self._arrays

    def arrays(self) -> Mapping[str, mx.array]:
        """Return what open snapshots own by name, for the ledger; do not keep the arrays."""
        return {
            f"{snapshot.kind}.{ident}.{number}.{part}": array
            for ident, snapshot in self._open.items()
            for number, stack in enumerate(snapshot.stacks)
            for part, array in enumerate(stack)
        }

    def lazy_of(self, row: RowId) -> tuple[Snapshot, ...]:
        """Return the row's open lazy snapshots, oldest first."""
        return tuple(self._lazy.get(row, {}).values())

    def add_lazy(self, row: RowId, kind: Kind, start: int, stop: int) -> Snapshot:
        """Open a snapshot that names positions [start, stop) of `row`; `kind` is sliceable."""
        assert kind.sliceable, f"{kind} changes with every token"
        snapshot = Snapshot(self, self._next_ident, kind, start, stop, row=row)
        self._lazy.setdefault(row, {})[snapshot.ident] = snapshot
        return self._enter(snapshot)

    def add_owned(self, kind: Kind, start: int, stop: int, stacks: tuple[Stack, ...]) -> Snapshot:
        """Open a snapshot of compact copies of all the kind's layers, which nobody else keeps."""
        self._count(stacks, 1)
        return self._enter(Snapshot(self, self._next_ident, kind, start, stop, stacks=stacks))

    def copy_out(self, snapshots: Sequence[Snapshot], *, waits: bool = True) -> None:
        """Let lazy snapshots own what they name: one evaluation for all, then the hooks.

        waits: until they are copied; else that is only dispatched. Then whoever changes the arenas
        otherwise than by kernels in place waits first: MLX would write into a copy of them.
        """
        if not snapshots:
            return
        allocate_exactly()
        copies = [snapshot.read_stacks() for snapshot in snapshots]
        (wait if waits else _dispatch)(copies)
        for snapshot, stacks in zip(snapshots, copies, strict=True):
            self._forget_row(snapshot)
            self._count(stacks, 1)
            snapshot.row, snapshot.owned = None, stacks
        for snapshot in snapshots:
            if snapshot.on_materialise is not None:
                snapshot.on_materialise(snapshot.nbytes)

    def end(self, snapshot: Snapshot) -> None:
        """Forget a snapshot and what it owns.

        Raises:
            SnapshotError: it has ended already.
        """
        snapshot.check_open()
        self._forget_row(snapshot)
        del self._open[snapshot.ident]
        self._count(snapshot.stacks, -1)
        snapshot.row = snapshot.owned = None

    def split(self, snapshot: Snapshot, at: int) -> tuple[Snapshot, Snapshot]:
        """Use a snapshot up for two that meet at `at`, which lies inside it."""
        kind, start, stop, row = snapshot.kind, snapshot.start, snapshot.stop, snapshot.row
        stacks = list(snapshot.stacks)
        self.end(snapshot)
        if row is not None:
            return self.add_lazy(row, kind, start, at), self.add_lazy(row, kind, at, stop)
        left: list[Stack] = []
        right: list[Stack] = []
        while stacks:
            some = _take_some(stacks)
            allocate_exactly()
            parts = [
                (compact(stack, 0, at - start), compact(stack, at - start, stop - start))
                for stack in some
            ]
            self._finish(parts)
            left += [before for before, _ in parts]
            right += [after for _, after in parts]
        return (
            self.add_owned(kind, start, at, tuple(left)),
            self.add_owned(kind, at, stop, tuple(right)),
        )

    def merge(self, parent: Snapshot, child: Snapshot) -> Snapshot:
        """Return one snapshot of what the two adjacent ones hold; both end.

        Two lazy ones of one row become a lazy one; a whole-state kind's child stands for both and
        is returned as it is; else the result owns a copy. A new snapshot has no hook.

        Raises:
            SnapshotError: one has ended, or they are of different kinds or not adjacent.
        """
        parent.check_open()
        child.check_open()
        if parent is child or parent.kind is not child.kind:
            raise SnapshotError(f"{parent} and {child} do not go together")
        if not child.kind.sliceable:
            parent.close()
            return child
        if parent.stop != child.start:
            raise SnapshotError(f"{parent} and {child} are not adjacent")
        if parent.row is not None and parent.row == child.row:
            merged = self.add_lazy(parent.row, parent.kind, parent.start, child.stop)
            parent.close()
            child.close()
            return merged
        return self._join(parent, child)

    def _join(self, parent: Snapshot, child: Snapshot) -> Snapshot:
        kind, start, stop = parent.kind, parent.start, child.stop
        before, after = list(parent.read_stacks()), list(child.read_stacks())
        parent.close()
        child.close()
        stacks: list[Stack] = []
        for some in in_parts(take_pairs(before, after), lambda pair: sum(map(nbytes_of, pair))):
            allocate_exactly()
            joined = [concatenate(*pair) for pair in some]
            self._finish(joined)
            stacks += joined
        return self.add_owned(kind, start, stop, tuple(stacks))

    def _enter(self, snapshot: Snapshot) -> Snapshot:
        self._open[snapshot.ident] = snapshot
        self._next_ident += 1
        return snapshot

    def _count(self, stacks: tuple[Stack, ...], sign: int) -> None:
        for stack in stacks:
            self._arrays += sign * len(stack)
            self._nbytes += sign * nbytes_of(stack)

    def _forget_row(self, snapshot: Snapshot) -> None:
        if snapshot.row is None:
            return
        named = self._lazy[snapshot.row]
        del named[snapshot.ident]
        if not named:
            del self._lazy[snapshot.row]


def _dispatch(arrays: object) -> None:
    """Evaluate arrays behind what is under way."""
    mx.async_eval(arrays)  # type: ignore[no-untyped-call]


def _take_some(stacks: list[Stack]) -> list[Stack]:
    """Take the first stacks away from a list: those copied together, each released when done.

    So a second copy takes no more than `LIFTED_NBYTES`, or one layer's memory, where the book
    waits; where it does not, each is released when the device has come to it. For two that are
    joined see `take_pairs`.
    """
    some = next(iter(in_parts(stacks, nbytes_of)))
    del stacks[: len(some)]
    return some
