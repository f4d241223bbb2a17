"""One run: draw, measure what the tests reach, try each mutant, keep what came of it.

What is measured and what came out is kept for one state of the tree, in a folder named after it.
"""

from __future__ import annotations

import hashlib
import queue
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, TypeVar

from mutations.copies import PACKAGE_FOLDERS, Copy, make_copy
from mutations.drawing import draw
from mutations.places import Mutant
from mutations.reach import Reach, measure, read_reach, shards_of
from mutations.report import Results, key
from mutations.running import Done
from mutations.trials import (
    MYPY_REFUSED,
    PYTEST_PASSED,
    Outcome,
    check_types,
    choose,
    run_tests,
    try_mutant,
)

T = TypeVar("T")


def fingerprint(root: Path) -> str:
    """Return a name for a state of the source and the tests: what was measured holds for it."""
    digest = hashlib.sha256()
    for folder in (*PACKAGE_FOLDERS, "tests"):
        for path in sorted((root / folder).rglob("*.py")):
            digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


class Copies:
    """A few copies of the tree, each lent to one task at a time."""

    def __init__(self, root: Path, place: Path, count: int) -> None:
        """Make `count` copies of the tree at `root` below `place`."""
        self._count = count
        self._free: queue.SimpleQueue[Copy] = queue.SimpleQueue()
        for index in range(count):
            self._free.put(make_copy(root, place / str(index)))

    def each(self, tasks: Sequence[Callable[[Copy], T]], done: Callable[[T], None]) -> None:
        """Run tasks, as many at a time as there are copies; `done` gets each result as it comes."""
        with ThreadPoolExecutor(self._count) as pool:
            try:
                for future in as_completed([pool.submit(self._lend, task) for task in tasks]):
                    done(future.result())
            finally:
                pool.shutdown(wait=True, cancel_futures=True)

    def _lend(self, task: Callable[[Copy], T]) -> T:
        copy = self._free.get()
        try:
            return task(copy)
        finally:
            self._free.put(copy)


def measure_reach(copies: Copies, root: Path, kept: Path) -> Reach:
    """Return what the tests reach, measuring what no earlier run has."""
    shards = shards_of(root)
    places = [kept / f"shard-{index:03}" for index in range(len(shards))]
    done = 0

    def tell(_: None) -> None:
        nonlocal done
        done += 1
        print(f"measured {done} of {len(shards)} shards of the tests", flush=True)

    tasks = [
        lambda copy, files=files, place=place: measure(copy, files, place)
        for files, place in zip(shards, places, strict=True)
    ]
    copies.each(tasks, tell)
    return read_reach(places)


def check_unmutated(copies: Copies, tests: list[str], expected_s: float) -> None:
    """See the tests of some mutants pass where nothing is wrong, and the types too.

    Raises RuntimeError where they do not: every mutant would then seem to be seen.
    """

    def see(done: Done) -> None:
        if done.status != PYTEST_PASSED:
            raise RuntimeError(f"the tests fail without a mutant:\n{done.output}")

    def see_types(done: Done) -> None:
        if done.status == MYPY_REFUSED:
            raise RuntimeError(f"the types are wrong without a mutant:\n{done.output}")

    copies.each([lambda copy: run_tests(copy, tests, expected_s)], see)
    copies.each([check_types], see_types)


def try_all(
    copies: Copies, root: Path, mutants: list[Mutant], reach: Reach, results: Results
) -> None:
    """Try each mutant that has no outcome yet, and keep what comes of it."""
    known = results.known_keys()
    chosen = {
        mutant: choose(mutant, reach, root)
        for mutant in mutants
        if key(mutant.source, mutant.line, mutant.diff) not in known
    }
    if not chosen:
        return
    taking_s = {
        mutant: sum(reach.took_s[test] for test in tests) for mutant, tests in chosen.items()
    }
    first = next((mutant for mutant, tests in chosen.items() if tests), None)
    if first is not None:  # without tests pytest would run them all
        check_unmutated(copies, chosen[first], taking_s[first])

    def keep(outcome: Outcome) -> None:
        results.add(outcome)
        mutant = outcome.mutant
        print(f"{outcome.verdict.value}: {mutant.source}:{mutant.line}", flush=True)

    tasks = [
        lambda copy, mutant=mutant, number=number: try_mutant(
            mutant, number, chosen[mutant], taking_s[mutant], copy
        )
        for number, mutant in enumerate(chosen)
    ]
    copies.each(tasks, keep)


def mutate(
    root: Path, *, count: int, seed: int, processes: int, kept: Path
) -> list[Mapping[str, Any]]:
    """Try the mutants that `seed` draws in the tree at `root`; return what came of each.

    Raises RuntimeError where the tests fail without a mutant.
    """
    own = kept / fingerprint(root)
    own.mkdir(parents=True, exist_ok=True)
    mutants = draw(root, count=count, seed=seed)
    results = Results(own / "results.jsonl")
    with tempfile.TemporaryDirectory(prefix="mlxd-mutations-") as place:
        copies = Copies(root, Path(place), processes)
        try_all(copies, root, mutants, measure_reach(copies, root, own), results)
    return results.of(key(each.source, each.line, each.diff) for each in mutants)
