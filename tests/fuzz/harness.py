"""Runs one target with one input after the other, for as long as there is time.

A target is one function: it makes an input in a folder from a source of random numbers, hands it to
what is tested, and returns. It may raise MlxdError, which every wrong input must become. What must
hold besides is kept here, for every input:
- nothing is opened that lies neither in the folder nor below what Python itself reads, nor is
  where output goes that nobody reads;
- no input takes more of the processor than RUN_S_MAX on the thread that tries it;
- the process does not grow by more than GROWTH_NBYTES_MAX.
A failure names the target and the number of the input, from which it can be run again.
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from mlxd_shared.domain.errors import MlxdError
from tests.support.effort import FACTOR, IN_CI
from tests.support.peaks import peak_nbytes

Target = Callable[[random.Random, Path], None]

ALL_TARGETS_CI_S = 30.0
TARGET_S = 0.4
TARGET_SOAK_S = 120.0
RUN_S_MAX = 5.0
GROWTH_NBYTES_MAX = 512 << 20
RUNS_MIN = 20
RUNS_MAX = 2000
"""So that the inputs of a fast machine are known too: none but these is ever met outside soak."""
_READING = frozenset({"open", "os.listdir", "os.scandir"})


@dataclass(frozen=True, slots=True)
class Tried:
    """What a target was put through."""

    runs: int
    refused: int


class Breach(AssertionError):
    """An input that broke a rule."""


def seconds(targets: int, *, soak: bool = False) -> float:
    """Return how long each of so many targets is tried."""
    if soak:
        return TARGET_SOAK_S
    return ALL_TARGETS_CI_S / targets if IN_CI else TARGET_S * FACTOR


def fuzz(
    target: Target,
    folder: Path,
    *,
    for_s: float,
    seed: int = 0,
    runs_min: int = RUNS_MIN,
    runs_max: int | None = RUNS_MAX,
) -> Tried:
    """Try inputs until the time is over and some were refused and some not, within these numbers.

    Raises:
        Breach: an input was not refused as what it is, or broke a rule above.
    """
    end_s = time.monotonic() + for_s
    before_nbytes = peak_nbytes()
    runs = refused = 0
    while runs < runs_min or (
        runs != runs_max and (time.monotonic() < end_s or not 0 < refused < runs)
    ):
        place = folder / str(runs % 64)
        place.mkdir(exist_ok=True)
        with _number_breaches(target, seed, runs):
            refused += _run(target, random.Random(f"{seed}/{runs}"), place)
        runs += 1
    grown = peak_nbytes() - before_nbytes
    if grown > GROWTH_NBYTES_MAX:
        raise Breach(f"{target.__name__}: {grown >> 20} MiB more after {runs} inputs")
    return Tried(runs, refused)


def _run(target: Target, rng: random.Random, place: Path) -> bool:
    """Try one input; return whether it was refused."""
    begin_s = time.thread_time()
    with opened_below(place):
        try:
            target(rng, place)
            refused = False
        except MlxdError as error:
            error.describe().encode()
            refused = True
    took_s = time.thread_time() - begin_s
    if took_s > RUN_S_MAX:
        raise Breach(f"took {took_s:.1f} s")
    return refused


@contextmanager
def _number_breaches(target: Target, seed: int, run: int) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise Breach(f"{target.__name__}, seed {seed}, input {run}: {error!r:.2000}") from error


class _Watch:
    """Whom opened files are told to; a hook of the interpreter cannot be taken out again."""

    def __init__(self) -> None:
        self.below: Path | None = None
        self.outside: list[str] = []
        python = (sys.prefix, sys.base_prefix, *sys.path, os.devnull)
        self._own = tuple(os.path.realpath(path) for path in python)
        sys.addaudithook(self._hear)

    def _hear(self, event: str, arguments: tuple[object, ...]) -> None:
        if event not in _READING or self.below is None:
            return
        if not isinstance(arguments[0], str | bytes | os.PathLike):
            return
        path = os.path.realpath(os.fsdecode(arguments[0]))
        if not f"{path}/".startswith((f"{self.below}/", *self._own)):
            self.outside.append(path)


_watches: list[_Watch] = []


@contextmanager
def opened_below(folder: Path) -> Iterator[None]:
    """Refuse that the body opens a file that lies elsewhere, links followed.

    Raises:
        Breach: it did.
    """
    if not _watches:
        _watches.append(_Watch())
    (watch,) = _watches
    watch.below, watch.outside = folder.resolve(), []
    try:
        yield
    finally:
        watch.below = None
    if watch.outside:
        raise Breach(f"opened {watch.outside[0]}")
