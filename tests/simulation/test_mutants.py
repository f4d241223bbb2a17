"""The simulation itself is tested: each fault sown into the core is found, in a few seeds."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.simulation.mutants import MUTANTS, Mutant, describe_finding
from tests.support.effort import IN_SOAK

SEEDS = 320


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_sown_fault_is_found(mutant: Mutant, tmp_path: Path) -> None:
    """A core with this fault does not live through the first seeds; all but soak start near."""
    first = 0 if IN_SOAK else mutant.seed
    assert describe_finding(mutant, tmp_path, seeds=SEEDS, first=first) is not None


def test_the_real_core_is_told_from_its_mutants(tmp_path: Path) -> None:
    """The copy without a fault lives: what finds the others is no fault of the copying."""
    same = Mutant("none", "turn.py", "retry_s=None", "retry_s=None")
    assert describe_finding(same, tmp_path, seeds=5) is None
