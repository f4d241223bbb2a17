"""Drawn traffic on engines of every kind of memory keeps all that the engine promises."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from mlxd_worker.constraints.compiler import Constraints
from mlxd_worker.tokenizer_files import load_tokenizer
from tests.support.effort import examples
from tests.support.engine_machine import EngineMachine
from tests.support.remembering import MEMORIES
from tests.worker.tiny import load


@pytest.mark.parametrize("memory", MEMORIES)
def test_whatever_clients_do(memory: str, tmp_path: Path) -> None:
    """Each stream has one end and no gap, bounds hold, and nothing is left when all have ended."""
    folder = MEMORIES[memory](tmp_path / memory)
    model, tokenizer = load(folder), load_tokenizer(folder)
    constraints = Constraints(tokenizer, model.vocab_size)

    run_state_machine_as_test(
        lambda: EngineMachine(model, tokenizer, constraints),  # type: ignore[arg-type]  # made anew
        settings=settings(max_examples=examples(3), stateful_step_count=25),
    )
