"""Every family that the registry has is proved, on a model small enough for any machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlxd_models.families.registry import REGISTRY
from mlxd_shared.domain.devices import DeviceKind
from mlxd_shared.domain.fast_paths import FastPath
from mlxd_worker.kernels.device import runs_cpu
from mlxd_worker.proof.families import OWN
from mlxd_worker.proof.judging import Result
from mlxd_worker.proof.paths import PATHS
from mlxd_worker.proof.products import PRODUCT_PATHS
from mlxd_worker.proof.prover import Prover
from mlxd_worker.proof.subjects import make_subject
from tests.support.effort import spread_evenly

FAMILIES = sorted(REGISTRY)


def test_no_family_and_no_path_is_left_out() -> None:
    """A new family needs its line in `OWN`, and a new path one in `PATHS` or `PRODUCT_PATHS`."""
    assert OWN.keys() == REGISTRY.keys()
    paths = [proof.path for proof in PATHS]
    assert sorted([*paths, *PRODUCT_PATHS]) == sorted(FastPath)


@pytest.mark.skipif(not runs_cpu(), reason="models are made for a CPU here")
@pytest.mark.parametrize("name", spread_evenly(FAMILIES, 5, in_ci=8))
def test_a_family_passes(name: str, tmp_path: Path) -> None:
    """All paths and checks, on random weights."""
    results: list[Result] = []
    subject = make_subject(name, tmp_path, DeviceKind.CPU)
    Prover(results.append, lambda _: None).prove_family(subject)

    assert [result for result in results if result.problem] == []
    assert len(results) > 3
