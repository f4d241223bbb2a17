"""The property tests again, with fresh seeds and many more examples than the short run has."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from tests.support.effort import VARIABLE
from tests.tidy.tree import ROOT

FACTOR = 20

PROPERTY_TESTS = (
    "tests/controller/core/test_machine.py",
    "tests/controller/store/test_stores.py",
    "tests/system/test_parity.py",
    "tests/worker/cache/test_contract.py",
    "tests/worker/cache/test_trie_programs.py",
    "tests/worker/cache/test_table.py",
    "tests/worker/cache/test_kv.py",
    "tests/worker/engine/test_programs.py",
    "tests/worker/engine/test_near_ties.py",
    "tests/worker/engine/sampling/test_sampler.py",
    "tests/worker/engine/test_text.py",
    "tests/worker/memory/test_ledger.py",
)

_CUT_IN_CI = re.compile(r"^from tests\.support\.effort import|^@given|^    @given", re.MULTILINE)

PARTLY_IN_CI = sorted(
    path.relative_to(ROOT).as_posix()
    for path in (ROOT / "tests").rglob("test_*.py")
    if "soak" not in path.parts
    and path.relative_to(ROOT).as_posix() not in PROPERTY_TESTS
    and _CUT_IN_CI.search(path.read_text())
)
"""Long in themselves: `.ci/run` tries a part of them, and here they are tried whole."""
WHOLE_FACTOR = 2


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("path", PROPERTY_TESTS)
def test_many_more_examples(path: str) -> None:
    """No example breaks a property, among twenty times as many as `.ci/run` tries."""
    _run(path, FACTOR)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("path", PARTLY_IN_CI)
def test_what_ci_tries_in_part(path: str) -> None:
    """Every cut of a stream, and twice as many examples."""
    _run(path, WHOLE_FACTOR)


def _run(path: str, factor: int) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--timeout=1700", path],
        cwd=ROOT,
        env=os.environ | {VARIABLE: str(factor)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:]
