"""Mutation testing, the trials: what counts as seen, which tests are chosen, what is left behind.

A package of one file, with three tests, stands for the tree; its tests really run.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from mutations.copies import ROOT, Copy, make_copy
from mutations.places import Mutant, Places
from mutations.reach import measure, read_reach
from mutations.report import Results, key, share, words
from mutations.running import run
from mutations.session import Copies, check_unmutated, mutate
from mutations.trials import Outcome, Verdict, choose, try_mutant
from tests.support.effort import spread_evenly

pytestmark = pytest.mark.timeout(900)
"""Each test starts several interpreters, one after another."""

SOURCE = "worker/small/parity.py"
TEXT = '''"""Numbers, even and odd."""


def is_even(number: int) -> bool:
    """Tell whether 2 divides it."""
    return number % 2 == 0


def halvings(number: int) -> int:
    """Count how often 2 divides it."""
    count = 0
    while is_even(number):
        number //= 2
        count += 1
    return count
'''
TESTS = """\
import subprocess, sys
from small.parity import halvings, is_even

CODE = "from small.parity import is_even; assert is_even(2)"

def test_even():
    assert is_even(2)

def test_halvings():
    assert halvings(12) == 2

def test_a_bare_program():
    subprocess.run([sys.executable, "-c", CODE], env={}, check=True)

def test_a_program():
    subprocess.run([sys.executable, "-c", CODE], check=True)
"""
FILE = "tests/worker/test_parity.py"
EVEN, HALVINGS, BARE, PROGRAM = (
    f"{FILE}::test_{name}" for name in ("even", "halvings", "a_bare_program", "a_program")
)
NO_PLUGINS = "-p no:anyio -p no:asyncio -p no:hypothesispytest -p no:randomly -p no:xdist"
"""Loading them takes a run of the small tests three times as long as all else that it does."""
FILES = {
    SOURCE: TEXT,
    "worker/small/__init__.py": "",
    FILE: TESTS,
    "pytest.ini": f"[pytest]\naddopts = --import-mode=importlib {NO_PLUGINS}\n",
    "pyproject.toml": "[tool.mypy]\nfiles = 'worker/small'\nmypy_path = 'worker'\n",
}


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make the small tree, with the plugin that measures, as git would see it."""
    root = tmp_path_factory.mktemp("small") / "tree"
    plugin = {
        name: (ROOT / name).read_text(encoding="utf-8")
        for name in ("tools/mutations/__init__.py", "tools/mutations/covering.py")
    }
    for name, text in {**FILES, **plugin}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")
    subprocess.run(["git", "init", "--quiet"], cwd=root, check=True)
    return root


@pytest.fixture(scope="module")
def copy(tree: Path) -> Copy:
    """Make the private copy in which mutants are tried."""
    return make_copy(tree, tree.parent / "private")


def mutant_with(changed: str) -> Mutant:
    """Return the mutant of the small file in which a line has become `changed`."""
    places = Places(SOURCE, TEXT)
    mutants = [mutant for line in places.lines for mutant in places.mutants(line)]
    (wanted,) = [each for each in mutants if f"+{changed}" in each.diff.splitlines()]
    return wanted


ODD = "    return number % 2 != 0"
QUOTIENT = "    return number / 2 == 0"
ENDLESS = "        number = 2"
SAME = "    count = 1"
NO_NUMBER = "    count = None"


@pytest.mark.parametrize("killer", spread_evenly([PROGRAM, BARE, EVEN], 1, in_ci=1))
def test_a_mutant_that_a_test_sees_is_killed(copy: Copy, tree: Path, killer: str) -> None:
    """Programs that a test starts run it too, in any environment; then all is as it was."""
    tried = try_mutant(mutant_with(ODD), 1, [killer], 1.0, copy)

    assert (tried.verdict, tried.killer) == (Verdict.KILLED, killer)
    assert {(root / SOURCE).read_text(encoding="utf-8") for root in (tree, copy.root)} == {TEXT}


def test_a_survivor_is_reported(copy: Copy, tmp_path: Path) -> None:
    """A mutant that its tests pass with is told with its line and what was changed."""
    tried = try_mutant(mutant_with(SAME), 2, [EVEN], 1.0, copy)
    results = Results(tmp_path / "results.jsonl")
    results.add(tried)
    records = results.of(results.known_keys())

    assert tried.verdict is Verdict.SURVIVED
    said = words(records, seed=5)
    assert f"{SOURCE}:11: survived" in said
    assert "+    count = 1" in said
    assert "seed 5: 0 killed, 0 hung, 1 survived, " in said
    assert "0 refused; 0.0% seen by their own room" in said


def test_what_the_type_checker_refuses_is_no_survivor(copy: Copy) -> None:
    """Nobody could bring it in, whether a test sees it or not."""
    tried = try_mutant(mutant_with(NO_NUMBER), 7, [EVEN], 1.0, copy)

    assert (tried.verdict, tried.verdict.dead) == (Verdict.REFUSED, False)


def test_a_hang_is_a_kill(copy: Copy, tree: Path) -> None:
    """A loop that never ends is ended by the limit of its test, and was seen."""
    tried = try_mutant(mutant_with(ENDLESS), 3, [HALVINGS], 1.0, copy, test_limit_s=4.0)

    assert tried.verdict is Verdict.HUNG
    assert tried.verdict.dead
    assert (copy.root / SOURCE).read_text(encoding="utf-8") == TEXT


def test_a_test_that_fails_anyway_sees_nothing(copy: Copy) -> None:
    """A kill is believed only where its test passes without the mutant."""
    tried = try_mutant(mutant_with(ODD), 6, [f"{FILE}::test_gone"], 1.0, copy)

    assert (tried.verdict, tried.verdict.dead) == (Verdict.UNSURE, False)


def test_a_mutant_that_no_test_reaches_is_not_seen(copy: Copy) -> None:
    """Nothing is run for it."""
    tried = try_mutant(mutant_with(ODD), 4, [], 0.0, copy)

    assert (tried.verdict, tried.verdict.dead) == (Verdict.UNREACHED, False)


def test_an_interruption_leaves_no_mutant(copy: Copy) -> None:
    """Whatever ends the block, the file is restored, with the time of its last change."""
    before = (copy.root / SOURCE).stat().st_mtime_ns
    with (
        pytest.raises(KeyboardInterrupt),
        copy.holding(SOURCE, mutant_with(ODD).text, changed_s=1_000_000_005),
    ):
        raise KeyboardInterrupt

    assert (copy.root / SOURCE).read_text(encoding="utf-8") == TEXT
    assert (copy.root / SOURCE).stat().st_mtime_ns == before


def test_tests_are_chosen_by_what_they_reach(copy: Copy, tmp_path: Path) -> None:
    """Those that ran the line come first, in a program they started too; the rest of the file next.

    A shard that has been measured is not measured again.
    """
    measure(copy, [FILE], tmp_path / "shard")
    measure(copy, ["tests/worker/test_gone.py"], tmp_path / "shard")
    reach = read_reach([tmp_path / "shard"])

    assert set(reach.took_s) == {EVEN, HALVINGS, BARE, PROGRAM}
    assert reach.tests_of(SOURCE, range(6, 7)) == {EVEN, HALVINGS, PROGRAM}
    assert reach.tests_of(SOURCE, range(11, 12)) == {HALVINGS}
    chosen = choose(mutant_with(SAME), reach, copy.root)
    assert chosen[0] == HALVINGS
    assert set(chosen) == {EVEN, HALVINGS, BARE, PROGRAM}


def test_a_run_goes_on_where_it_was_cut_off(tmp_path: Path) -> None:
    """Outcomes are read again; of a line that was being written nothing is."""
    path = tmp_path / "results.jsonl"
    mutant = mutant_with(ODD)
    Results(path).add(Outcome(mutant, Verdict.KILLED, EVEN, 1, 0.5))
    with path.open("a", encoding="utf-8") as file:
        file.write('{"source": "worker/sm')

    assert Results(path).known_keys() == {key(mutant.source, mutant.line, mutant.diff)}


def test_the_share_counts_hangs_as_seen() -> None:
    """And what survives or is never reached as not; what the types refuse is not counted."""
    assert share({"verdict": verdict.value} for verdict in Verdict) == 2 / 5
    assert share([]) == 1.0


def test_a_command_past_its_limit_is_ended(tmp_path: Path) -> None:
    """It has no status, and what it wrote is kept."""
    command = ["sh", "-c", "echo begun; exec sleep 600"]
    done = run(command, cwd=tmp_path, environment={"PATH": "/usr/bin:/bin"}, limit_s=2.0)

    assert (done.status, done.output) == (None, "begun\n")


def test_a_whole_run_tries_what_it_drew_once(
    tree: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Each line drawn has an outcome; taken up again, the run has nothing left to try."""
    first = mutate(tree, count=2, seed=1, processes=2, kept=tmp_path)
    tried = capfd.readouterr().out
    again = mutate(tree, count=2, seed=1, processes=2, kept=tmp_path)

    assert len(first) == 2
    assert first == again
    assert all(f"{each['verdict']}: {SOURCE}:{each['line']}" in tried for each in first)
    assert SOURCE not in capfd.readouterr().out
    assert (tree / SOURCE).read_text(encoding="utf-8") == TEXT


def test_tests_that_fail_anyway_stop_the_run(tree: Path, tmp_path: Path) -> None:
    """With them every mutant would seem to be seen."""
    copies = Copies(tree, tmp_path, 1)

    check_unmutated(copies, [EVEN], 1.0)
    with pytest.raises(RuntimeError, match="fail without a mutant"):
        check_unmutated(copies, [f"{FILE}::test_gone"], 1.0)
