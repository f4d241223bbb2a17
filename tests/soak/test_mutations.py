"""Lines drawn at random are made wrong, one at a time: the tests of their own room are to see it.

MLXD_MUTATIONS says how many (200), MLXD_MUTATIONS_SEED which; without one they are others each
time, and the output names the seed. What is done is kept in build/mutations: a run that was
interrupted goes on there when it is given its seed.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.tidy.tree import ROOT

COUNT = os.environ.get("MLXD_MUTATIONS", "200")
SEED = os.environ.get("MLXD_MUTATIONS_SEED", "")


@pytest.mark.timeout(4 * 3600)
def test_the_tests_of_its_room_see_a_wrong_line(capfd: pytest.CaptureFixture[str]) -> None:
    """At least 85 % of the mutants are killed; the survivors are shown."""
    seed = ["--seed", SEED] if SEED else []
    with capfd.disabled():
        done = subprocess.run(
            [sys.executable, "-m", "mutations", "--count", COUNT, *seed],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT / "tools")},
            check=False,
        )
    assert done.returncode == 0, "too few mutants were seen: the survivors are listed above"
