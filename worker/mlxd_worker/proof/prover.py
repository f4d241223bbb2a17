"""The whole proof: products, then each family's paths and what must hold without those that fail.

Times come last.

Invariants:
- A path that was found wrong or slow is off from then on, in this process too: what is proved
  later is what a worker will run.
- Whatever a path raises is a finding like a wrong result; what ends the process is its starter's to
  tell, by the last line that said what was tried.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final

from mlxd_models.families.common.packing import Packing
from mlxd_shared.domain.devices import DeviceKind
from mlxd_shared.domain.fast_paths import FastPath
from mlxd_worker.kernels.switches import SWITCHES
from mlxd_worker.proof.judging import Result
from mlxd_worker.proof.paths import CHECKS, PATHS, Check, PathProof
from mlxd_worker.proof.products import PRODUCT_PATHS, compare_products, describe_packing, packings
from mlxd_worker.proof.streams import run_company
from mlxd_worker.proof.subjects import Subject
from mlxd_worker.proof.timing import MakeRun, Run, time_path
from mlxd_worker.proof.walks import step_through

PROBLEM_CHARS_MAX: Final = 300


Try = Callable[[str], None]
"""Told what is tried next."""


class Prover:
    """Proves subject after subject, and switches off what fails. One thread, which has MLX."""

    def __init__(
        self,
        tell: Callable[[Result], None],
        trying: Try,
        *,
        paths: Sequence[PathProof] = PATHS,
        checks: Mapping[str, Check] = CHECKS,
    ) -> None:
        """Tell of every result, and before it of what is tried."""
        self._tell = tell
        self._trying = trying
        self._paths = paths
        self._checks = checks

    def prove_products(
        self,
        kind: DeviceKind,
        *,
        compare: Callable[[Packing, DeviceKind], str | None] = compare_products,
    ) -> None:
        """Prove the products with packed weights, which every path takes.

        Our own kernel for some of them is switched off if they are right without it.
        """
        for packing in packings():
            name = describe_packing(packing)
            self._trying(f"products with packed weights: {name}")
            self._prove(
                "products with packed weights", name, partial(compare, packing, kind), PRODUCT_PATHS
            )

    def prove_family(self, subject: Subject) -> None:
        """Prove paths and checks on one model."""
        self._trying(f"the engine on {subject.name}")
        runs = partial(_run, subject)
        problem = _attempt(runs)
        if problem is not None:
            self._settle("the engine runs", subject.name, problem, runs, self._all_on(subject))
        for proof in self._paths_on(subject.kind):
            self._trying(f"{proof.path} on {subject.name}")
            problem = _attempt(partial(proof.compare, subject, proof.path))
            self._judge(f"fast path {proof.path}", subject.name, proof.path, problem)
        for name, check in self._checks.items():
            self._trying(f"{name}: {subject.name}")
            self._prove(name, subject.name, partial(check, subject), self._all_on(subject))

    def prove_speed(
        self,
        subject: Subject,
        make: MakeRun,
        *,
        time: Callable[[FastPath, MakeRun], str | None] = time_path,
    ) -> None:
        """Time each path that is on against doing without it; say of each run that it begins."""
        for proof in self._paths_on(subject.kind):
            runs = _announce(make, partial(self._trying, f"the speed of {proof.path}"))
            problem = _attempt(partial(time, proof.path, runs))
            self._judge(f"speed of {proof.path}", subject.name, proof.path, problem)

    def _paths_on(self, kind: DeviceKind) -> list[PathProof]:
        """Return the paths that this kind of device has, and that are not off."""
        return [
            proof for proof in self._paths if kind in proof.kinds and SWITCHES.is_on(proof.path)
        ]

    def _all_on(self, subject: Subject) -> list[FastPath]:
        """Return the same for a model, without what proves them."""
        return [proof.path for proof in self._paths_on(subject.kind)]

    def _prove(
        self,
        name: str,
        subject: str,
        prove: Callable[[], str | None],
        paths: Sequence[FastPath],
    ) -> None:
        """Tell what holds or not, whichever of these paths are taken."""
        problem = _attempt(prove)
        if problem is None:
            self._tell(Result(name, subject))
        else:
            self._settle(name, subject, problem, prove, paths)

    def _judge(self, name: str, subject: str, path: FastPath, problem: str | None) -> None:
        """Tell what a path's own check came to, and switch it off where it failed."""
        if problem is None:
            self._tell(Result(name, subject))
        else:
            SWITCHES.turn_off([path])
            self._tell(Result(name, subject, problem, path))

    def _settle(
        self,
        name: str,
        subject: str,
        problem: str,
        again: Callable[[], str | None],
        paths: Sequence[FastPath],
    ) -> None:
        """Switch off the first path without which what failed does not, and tell of it."""
        for path in filter(SWITCHES.is_on, paths):
            with SWITCHES.without(path):
                cured = _attempt(again) is None
            if cured:
                self._judge(name, subject, path, problem)
                return
        self._tell(Result(name, subject, problem))


def _run(subject: Subject) -> None:
    """Do what is compared; raises whatever a path raises."""
    step_through(subject)
    run_company(subject)


def _announce(make: MakeRun, say: Callable[[], None]) -> MakeRun:
    """Return a function that makes the same runs, and announces each one, and its making."""

    def make_runs() -> Run:
        say()
        run = make()

        def run_aloud() -> None:
            say()
            run()

        return run_aloud

    return make_runs


def _attempt(prove: Callable[[], str | None]) -> str | None:
    try:
        return prove()
    except Exception as error:  # noqa: BLE001 - whatever a kernel, a compiler or MLX raises
        return f"fails: {type(error).__name__}: {' '.join(str(error).split())}"[:PROBLEM_CHARS_MAX]
