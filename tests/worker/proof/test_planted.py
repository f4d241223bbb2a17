"""Faults that are planted in the engine: the proof finds each, blames its path, and no other."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import mlx.core as mx
import pytest

from mlxd_controller.store.shelves import demo_model
from mlxd_shared.domain.devices import DeviceKind
from mlxd_shared.domain.fast_paths import FastPath
from mlxd_worker.kernels.device import runs_cpu
from mlxd_worker.kernels.switches import SWITCHES
from mlxd_worker.proof.__main__ import check_tokenizer
from mlxd_worker.proof.judging import Result
from mlxd_worker.proof.paths import PATHS
from mlxd_worker.proof.prover import Prover
from mlxd_worker.proof.subjects import Subject, make_subject
from mlxd_worker.proof.timing import ROUNDS, ROUNDS_LEAST, MakeRun, Run, time_path
from tests.support.tiny_model import write_tiny_model
from tests.worker.proof.planted import Spoil, plant

ON_CPU = [proof.path for proof in PATHS if DeviceKind.CPU in proof.kinds]
pytestmark = pytest.mark.skipif(not runs_cpu(), reason="what is planted is a CPU's")


@pytest.fixture(scope="module", name="sound")
def sound_subject(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    """A random Llama."""
    return make_subject("LlamaForCausalLM", tmp_path_factory.mktemp("llama"), DeviceKind.CPU)


@pytest.fixture(autouse=True)
def _switches() -> Iterator[None]:
    """What a test switches off is on again behind it."""
    with SWITCHES.without():
        yield


def prove(subject: Subject) -> list[Result]:
    """Return all results of one model's proof."""
    results: list[Result] = []
    Prover(results.append, lambda _: None).prove_family(subject)
    return results


def rolled_with(path: FastPath) -> Spoil:
    """Return what makes every token's logits its neighbour's where a path is on."""
    return lambda logits: mx.roll(logits, 1, -1) if SWITCHES.is_on(path) else logits


def test_a_sound_engine_passes(sound: Subject) -> None:
    """Every path that this device has is proved, and so is what must hold of all."""
    results = prove(sound)

    assert [result.problem for result in results] == [""] * len(results)
    assert [result.check for result in results] == [
        *(f"fast path {path}" for path in ON_CPU),
        "a row is the same in any company",
        "steps write in place",
        "a resumed stream goes on",
    ]
    assert all(SWITCHES.is_on(path) for path in FastPath)


@pytest.mark.parametrize("path", ON_CPU)
def test_a_wrong_kernel_result(path: FastPath, sound: Subject) -> None:
    """It is found, its path goes off, and without it the engine passes."""
    results = prove(plant(sound, rolled_with(path)))

    (fault,) = [result for result in results if result.problem]
    assert (fault.check, fault.off) == (f"fast path {path}", path)
    assert [other for other in FastPath if not SWITCHES.is_on(other)] == [path]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_kernel_whose_results_are_no_numbers(value: float, sound: Subject) -> None:
    """It is as wrong as any."""

    def spoil(logits: mx.array) -> mx.array:
        return logits * value if SWITCHES.is_on(FastPath.LANES) else logits

    results = prove(plant(sound, spoil))

    assert {result.off for result in results if result.problem} == {FastPath.LANES}


def test_a_kernel_that_raises(sound: Subject) -> None:
    """The engine does not run; the path without which it does goes off."""

    def spoil(logits: mx.array) -> mx.array:
        if SWITCHES.is_on(FastPath.EXPONENTIALS):
            raise RuntimeError("no such kernel")
        return logits

    results = prove(plant(sound, spoil))

    (fault,) = [result for result in results if result.problem]
    assert (fault.check, fault.off) == ("the engine runs", FastPath.EXPONENTIALS)
    assert "RuntimeError: no such kernel" in fault.problem


def test_rows_that_feel_their_neighbours(sound: Subject) -> None:
    """No path is to blame, so none goes off for it."""
    results = prove(plant(sound, lambda logits: mx.roll(logits, len(logits) > 1, -1)))

    (company,) = [r for r in results if r.check == "a row is the same in any company"]
    assert company.problem
    assert company.off is None


def ticking(path: FastPath, *, cost: int) -> tuple[MakeRun, Iterator[float]]:
    """Return runs that take so many ticks more with a path than without, and their clock."""
    ticks = itertools.count()

    def make() -> Run:
        def run() -> None:
            for _ in range(10 + (cost if SWITCHES.is_on(path) else 0)):
                next(ticks)

        return run

    return make, map(float, ticks)


@pytest.mark.parametrize(("cost", "slow"), [(0, False), (-5, False), (5, True)])
def test_a_slow_fast_path(cost: int, sound: Subject, *, slow: bool) -> None:
    """By a tenth or more it goes off, with how much slower it is; a fast one stays."""
    results: list[Result] = []
    make, clock = ticking(FastPath.LANES, cost=cost)
    time = partial(time_path, clock=lambda: next(clock))
    Prover(results.append, lambda _: None).prove_speed(sound, make, time=time)

    assert [result.check for result in results] == [f"speed of {path}" for path in ON_CPU]
    assert [r.off for r in results if r.problem] == ([FastPath.LANES] if slow else [])
    assert SWITCHES.is_on(FastPath.LANES) is not slow


def test_every_timed_run_says_that_it_begins(sound: Subject) -> None:
    """A slow machine is not taken for one that hangs; only what looks slow is timed to the end."""
    steps: list[str] = []
    make, clock = ticking(FastPath.LANES, cost=5)
    time = partial(time_path, clock=lambda: next(clock))
    Prover(lambda _: None, steps.append).prove_speed(sound, make, time=time)

    rounds = {path: ROUNDS if path is FastPath.LANES else ROUNDS_LEAST for path in ON_CPU}
    assert steps == [f"the speed of {path}" for path in ON_CPU for _ in range(2 + 2 * rounds[path])]


def test_a_broken_tokenizer(tmp_path: Path) -> None:
    """Whatever is wrong with it, its file is named; a sound one is fine."""
    folder = write_tiny_model(tmp_path / "m")
    assert check_tokenizer(folder) is None
    assert check_tokenizer(demo_model()) is None

    (folder / "tokenizer.json").write_text('{"model": {"type": "BPE"')
    assert "tokenizer.json" in (check_tokenizer(folder) or "")
    (folder / "tokenizer.json").unlink()
    assert check_tokenizer(folder) is not None
