"""The ledger: every byte that the worker keeps has an account and a name.

Invariants:
- An account's bytes are the sum of `nbytes` of live arrays that have a name in it; none is a
  remainder. The total is the sum of the accounts, always.
- An array known under several names counts once, under the first. Arrays are told apart as objects:
  whoever keeps an array keeps no view of it beside it, so an object is a buffer.
- A pin is counted. Unpinning below zero is an error. At zero the array is kept until `sweep`.
- Arrays that are replaced at every step (caches) are not pinned but asked for: a source names its
  live arrays when the ledger is read. One of very many that nobody else names may keep a tally of
  them instead, which is read in its place and compared with the arrays at every sweep.
- Engine thread only; readers elsewhere get the frozen reports.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import mlx.core as mx

from mlxd_shared.domain.figures import MemoryAccount
from mlxd_worker.kernels.device import runs_cpu

TOLERANCE_CPU_NBYTES = 64 << 10
TOLERANCE_CPU_FRACTION = 0.001
TOLERANCE_GPU_NBYTES = 4 << 20
TOLERANCE_GPU_FRACTION = 0.01


class Account(StrEnum):
    """What the bytes are for."""

    WEIGHTS = "weights"
    KV = "kv"
    PREFIX = "prefix"
    IMAGES = "images"
    DRAFT = "draft"
    WORKSPACE = "workspace"


class LedgerError(Exception):
    """A bug of the caller: a pin below zero, or two arrays under one name."""


class ArraySource(Protocol):
    """Something whose live arrays change between reads."""

    def arrays(self) -> Mapping[str, mx.array]:
        """Return the live arrays by name."""


Tally = Callable[[], tuple[int, int]]
"""Returns bytes and number of what a source names."""


@dataclass(frozen=True, slots=True)
class Audit:
    """The accounts against what MLX says is alive."""

    accounts: tuple[MemoryAccount, ...]
    active_nbytes: int
    cache_nbytes: int
    peak_nbytes: int
    tolerance_nbytes: int

    @property
    def accounted_nbytes(self) -> int:
        """Sum of the accounts."""
        return sum(report.nbytes for report in self.accounts)

    @property
    def unaccounted_nbytes(self) -> int:
        """Bytes alive without an account; negative where an account claims what is not there."""
        return self.active_nbytes - self.accounted_nbytes

    @property
    def holds(self) -> bool:
        """Whether the difference is within the tolerance; expected of an idle worker."""
        return abs(self.unaccounted_nbytes) <= self.tolerance_nbytes


@dataclass(slots=True)
class _Pin:
    array: mx.array
    count: int


@dataclass(frozen=True, slots=True)
class _Source:
    named: ArraySource
    tally: Tally | None


class Ledger:
    """All accounts of one worker. One owner: the engine thread."""

    def __init__(self) -> None:
        self._pins: dict[tuple[Account, str], _Pin] = {}
        self._sources: dict[tuple[Account, str], _Source] = {}

    def pin(self, account: Account, name: str, array: mx.array) -> None:
        """Count one more use of `array` under `name`.

        Raises:
            LedgerError: the name stands for another array.
        """
        pin = self._pins.get((account, name))
        if pin is None:
            self._pins[account, name] = _Pin(array, count=1)
        elif pin.array is array:
            pin.count += 1
        else:
            raise LedgerError(f"{account}/{name} stands for another array already")

    def pin_all(self, account: Account, arrays: Mapping[str, mx.array]) -> None:
        """Pin each array under its name."""
        for name, array in arrays.items():
            self.pin(account, name, array)

    def unpin(self, account: Account, name: str) -> None:
        """Count one use less.

        Raises:
            LedgerError: the name is unknown, or not pinned any more.
        """
        pin = self._pins.get((account, name))
        if pin is None or pin.count == 0:
            raise LedgerError(f"{account}/{name} is unpinned more often than it was pinned")
        pin.count -= 1

    def attach(
        self, account: Account, name: str, source: ArraySource, *, tally: Tally | None = None
    ) -> None:
        """Account for whatever `source` holds whenever the ledger is read, by `tally` if given.

        Raises:
            LedgerError: the name is taken.
        """
        if (account, name) in self._sources:
            raise LedgerError(f"{account}/{name} is attached already")
        self._sources[account, name] = _Source(source, tally)

    def detach(self, account: Account, name: str) -> None:
        """Stop accounting for a source.

        Raises:
            LedgerError: no source of this name is attached.
        """
        if self._sources.pop((account, name), None) is None:
            raise LedgerError(f"{account}/{name} is not attached")

    def report(self) -> tuple[MemoryAccount, ...]:
        """Return every account, in the enum's order, empty ones included."""
        nbytes = dict.fromkeys(Account, 0)
        counts = dict.fromkeys(Account, 0)
        seen: set[int] = set()
        for account, array in self._live():
            if id(array) not in seen:
                seen.add(id(array))
                nbytes[account] += array.nbytes
                counts[account] += 1
        for (account, _), source in self._sources.items():
            if source.tally is not None:
                held_nbytes, held = source.tally()
                nbytes[account] += held_nbytes
                counts[account] += held
        return tuple(MemoryAccount(each.value, nbytes[each], counts[each]) for each in Account)

    def audit(self) -> Audit:
        """Compare the accounts with MLX's own count; meaningful when nothing is in flight."""
        active_nbytes = mx.get_active_memory()
        return Audit(
            accounts=self.report(),
            active_nbytes=active_nbytes,
            cache_nbytes=mx.get_cache_memory(),
            peak_nbytes=mx.get_peak_memory(),
            tolerance_nbytes=_tolerance_nbytes(active_nbytes),
        )

    def sweep(self) -> Audit:
        """Drop what nobody pins, give MLX's pool back, and audit.

        Raises:
            LedgerError: a tally is not what its source's arrays come to.
        """
        for (account, name), source in self._sources.items():
            if source.tally is not None:
                arrays = source.named.arrays().values()
                counted = sum(array.nbytes for array in arrays), len(arrays)
                if counted != source.tally():
                    message = f"{account}/{name} tallies {source.tally()}, its arrays {counted}"
                    raise LedgerError(message)
        self._pins = {key: pin for key, pin in self._pins.items() if pin.count}
        mx.clear_cache()
        return self.audit()

    def _live(self) -> Iterator[tuple[Account, mx.array]]:
        # The arrays are held by their owners while this runs, so ids stay unique.
        for (account, _), pin in self._pins.items():
            yield account, pin.array
        for (account, _), source in self._sources.items():
            if source.tally is None:
                for array in source.named.arrays().values():
                    yield account, array


def _tolerance_nbytes(active_nbytes: int) -> int:
    if runs_cpu():
        return TOLERANCE_CPU_NBYTES + int(active_nbytes * TOLERANCE_CPU_FRACTION)
    return TOLERANCE_GPU_NBYTES + int(active_nbytes * TOLERANCE_GPU_FRACTION)
