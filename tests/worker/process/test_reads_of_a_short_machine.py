"""Weights that the machine cannot open or read just now are not their model's fault."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import mlx.core as mx
import pytest

from mlxd_models.files.weights import TensorFact, read_header
from mlxd_shared.domain.errors import InvalidModel, MachineShort
from mlxd_worker.models.weights.direct_reading import Segment, read_joined
from mlxd_worker.models.weights.lazy_tensors import LazyTensors, why_not_opened, why_not_read
from mlxd_worker.models.weights.reader import Reader

LIMIT_S = 120.0
SIDE = 64
UNREADABLE = Path("/proc/self/mem")
"""A regular file that opens, and at whose beginning the system answers EIO."""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A checkpoint of two tensors."""
    path = tmp_path / "model.safetensors"
    mx.save_safetensors(str(path), {name: mx.ones((SIDE, SIDE)) for name in ("a", "b")})
    return path


def unreadable(name: str = "a") -> TensorFact:
    """A tensor on a disk that fails."""
    return TensorFact(name, "F32", (SIDE, SIDE), 4 * SIDE * SIDE, UNREADABLE)


def test_want_of_open_files_is_not_said_of_weights(file: Path) -> None:
    """In a process that may open none each way of reading says so; later each reads them."""
    command = (sys.executable, "-m", "tests.support.reads_without_files", str(file))
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=LIMIT_S)
    outcomes: Mapping[str, tuple[str, str, float]] = json.loads(done.stdout)

    assert set(outcomes) == {"pop", "reopened", "direct"}
    for error, words, total in outcomes.values():
        assert error == "MachineShort", words
        assert words.startswith("the machine lacks open files: model.safetensors: Too many open")
        assert total == SIDE * SIDE


def test_a_disk_that_fails_is_not_said_of_weights_read_directly() -> None:
    """EIO from the system itself, in the threads that read."""
    with pytest.raises(MachineShort, match="lacks a disk that works: mem: Input/output error"):
        read_joined([Segment(unreadable())], (SIDE, SIDE), dtype="F32")


def test_why_mlx_could_not_read_is_learnt_from_the_system(file: Path) -> None:
    """EIO is the machine's, whichever tensor has it; a file that ends early is the model's."""
    good = next(fact for fact in read_header(file) if fact.name == "a")
    error = RuntimeError("[read] Unable to read from file.")

    assert isinstance(why_not_read([good, unreadable("b")], error), MachineShort)
    assert isinstance(why_not_read([good, unreadable("b")], error, field="made"), MachineShort)
    assert str(why_not_read([good], error)) == f"model.safetensors: a: could not be read: {error}"
    assert str(why_not_read([good], error, field="made")) == f"made: could not be read: {error}"
    with file.open("r+b") as stream:
        stream.truncate(good.begin + good.nbytes - 1)
    assert isinstance(why_not_read([good], error), InvalidModel)


def test_why_mlx_could_not_open_is_learnt_from_the_system(file: Path) -> None:
    """A file that has gone is named by its name alone; one that opens has what MLX says."""
    error = RuntimeError(f"Invalid json header in {file}")

    assert str(why_not_opened(file, error)) == (
        "model.safetensors: could not be opened: Invalid json header in model.safetensors"
    )
    file.unlink()
    assert str(why_not_opened(file, error)) == "model.safetensors: could not be opened: missing"


@pytest.mark.parametrize("whole", [False, True])
def test_an_evaluation_asks_the_system_why_it_failed(file: Path, *, whole: bool) -> None:
    """MLX fails because the file was cut; the disk that then fails is what is told of.

    Both of a reader's ways to evaluate: one tensor, and what was made of all.
    """
    facts = list(read_header(file))
    reader = Reader(
        facts, [], dtype=mx.float32, keep_packed=False, progress=lambda _done, _total: None
    )
    array = LazyTensors(facts).pop("a")
    with file.open("r+b") as stream:
        stream.truncate(facts[0].begin)
    file.unlink()
    file.symlink_to(UNREADABLE)

    def evaluate() -> None:
        if whole:
            reader.evaluate({"made": array})
        else:
            reader._evaluate(array, ["a"])

    with pytest.raises(MachineShort, match="lacks a disk that works"):
        evaluate()
