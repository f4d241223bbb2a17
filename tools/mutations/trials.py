"""Try one mutant: choose the tests of its room that can see it, run them, and say what came of it.

The tests that ran the line when it was right come first, and of these the ones named after the
file, then the quickest; after them those that ran any of the file, then those of what imports it,
until the time allowed is full.
"""

from __future__ import annotations

import enum
import re
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from mutations.copies import Copy
from mutations.places import Mutant, sources
from mutations.reach import Reach
from mutations.rooms import mirrors, room_of
from mutations.running import Done, run

TESTS_S = 60.0
"""As long as the tests of one mutant may take together, as measured when nothing was wrong."""

SLACK_S = 90.0
SLACK_FACTOR = 5.0
"""A run that takes that many times as long as measured, and so much more, hangs."""

TEST_LIMIT_S = 60.0
"""What one test may take; pytest ends it then, and it has failed."""

EARLIEST_CHANGE_S = 1_000_000_000
"""Each mutant's file is said to have changed at a second of its own, long ago."""


class Verdict(enum.StrEnum):
    """What came of a mutant.

    Unsure is one whose tests fail, or last as long, without it too; refused is one that no test
    sees and that the type checker does not let pass: nobody could bring it in.
    """

    KILLED = "killed"
    HUNG = "hung"
    SURVIVED = "survived"
    UNREACHED = "unreached"
    UNSURE = "unsure"
    REFUSED = "refused"

    @property
    def dead(self) -> bool:
        """Whether the tests saw it; a hang is seen."""
        return self in {Verdict.KILLED, Verdict.HUNG}


TYPES_LIMIT_S = 600.0
"""What the type checker may take over the whole tree, the first time without a cache."""

PYTEST_PASSED = 0
MYPY_REFUSED = 1
TIMEOUT = "+ Timeout +"
"""pytest-timeout says it when it has ended a test, and pytest with it."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """A mutant, what came of it, the test that failed first, how many were chosen, the time."""

    mutant: Mutant
    verdict: Verdict
    killer: str
    tests: int
    took_s: float


def choose(mutant: Mutant, reach: Reach, root: Path) -> list[str]:
    """Return the tests to run for a mutant, the likeliest to see it first."""
    room = tuple(f"{folder}/" for folder in room_of(mutant.source))
    chosen: list[str] = []
    left_s = TESTS_S
    for tier in _tiers(mutant, reach, root):
        own = {test for test in tier if test.startswith(room)} - set(chosen)
        for test in sorted(own, key=lambda test: _order(test, mutant.source, reach)):
            if reach.took_s[test] <= left_s:
                left_s -= reach.took_s[test]
                chosen.append(test)
    return chosen


def _order(test: str, source: str, reach: Reach) -> tuple[bool, float, str]:
    return not mirrors(test, source), reach.took_s[test], test


def _tiers(mutant: Mutant, reach: Reach, root: Path) -> Iterator[Iterable[str]]:
    """Yield the tests that ran the statement, those that ran its file, those of its importers.

    What runs as a module is imported is run by no test in particular.
    """
    yield reach.tests_of(mutant.source, mutant.reached_by)
    yield reach.tests_of(mutant.source)
    module = module_of(mutant.source)
    importing = {test for test in reach.took_s if _imports(root / test.partition("::")[0], module)}
    yield importing
    for other in sources(root):
        if _imports(root / other, module):
            yield reach.tests_of(other)


def module_of(source: str) -> str:
    """Return the dotted name of a source file."""
    return ".".join(Path(source).with_suffix("").parts[1:]).removesuffix(".__init__")


@cache
def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@cache
def _imports(path: Path, module: str) -> bool:
    """Tell whether a file imports a module by its full name, or from its package."""
    package, _, name = module.rpartition(".")
    pattern = rf"^\s*(from|import) {re.escape(module)}\b"
    if package:
        pattern += rf"|^\s*from {re.escape(package)} import [^\n]*\b{re.escape(name)}\b"
    return re.search(pattern, _text(path), re.MULTILINE) is not None


def try_mutant(
    mutant: Mutant,
    number: int,
    tests: list[str],
    expected_s: float,
    copy: Copy,
    *,
    test_limit_s: float = TEST_LIMIT_S,
) -> Outcome:
    """Run some tests in a copy that holds a mutant; the copy is as it was when this returns.

    What seems to see the mutant is run once more without it: a test that fails now and then, or a
    machine that is busy, would look like one that sees everything.
    """
    if not tests:
        return Outcome(mutant, Verdict.UNREACHED, "", 0, 0.0)
    began_s = time.monotonic()
    with copy.holding(mutant.source, mutant.text, changed_s=EARLIEST_CHANGE_S + number):
        done = run_tests(copy, tests, expected_s, test_limit_s=test_limit_s)
        verdict = _verdict(done)
        if verdict is Verdict.SURVIVED and check_types(copy).status == MYPY_REFUSED:
            verdict = Verdict.REFUSED
    match = re.search(r"^(?:FAILED|ERROR) (\S+)", done.output, re.MULTILINE)
    killer = match[1] if match else ""
    if verdict.dead:
        again = [test for test in tests if killer and test.startswith(killer)] or tests
        if run_tests(copy, again, expected_s, test_limit_s=test_limit_s).status != PYTEST_PASSED:
            verdict = Verdict.UNSURE
    took_s = round(time.monotonic() - began_s, 1)
    return Outcome(mutant, verdict, killer, len(tests), took_s)


def _verdict(done: Done) -> Verdict:
    if done.status == PYTEST_PASSED:
        return Verdict.SURVIVED
    return Verdict.HUNG if done.status is None or TIMEOUT in done.output else Verdict.KILLED


def run_tests(
    copy: Copy, tests: list[str], expected_s: float, *, test_limit_s: float = TEST_LIMIT_S
) -> Done:
    """Run tests in a copy, up to the first that fails or takes longer than its limit."""
    listed = copy.root.parent / "tests.txt"
    listed.write_text("\n".join(tests), encoding="utf-8")
    command = (str(copy.python), "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider")
    return run(
        [*command, f"--timeout={test_limit_s}", "--timeout-method=thread", f"@{listed}"],
        cwd=copy.root,
        environment=copy.environment(),
        limit_s=SLACK_S + SLACK_FACTOR * expected_s,
    )


def check_types(copy: Copy) -> Done:
    """Run the type checker over a copy, as its own settings say."""
    return run(
        [str(copy.python), "-m", "mypy"],
        cwd=copy.root,
        environment=copy.environment(),
        limit_s=TYPES_LIMIT_S,
    )
