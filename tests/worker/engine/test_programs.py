"""Drawn traffic on engines of every kind of memory keeps all that the engine promises."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings

from mlxd_worker.constraints.compiler import Constraints
from mlxd_worker.tokenizing.files import load_tokenizer
from tests.support.effort import examples
from tests.support.engine_programs import Action, Served, World, programs
from tests.support.remembering import MEMORIES
from tests.worker.tiny import load


@pytest.mark.parametrize("memory", MEMORIES)
def test_whatever_clients_do(memory: str, tmp_path: Path) -> None:
    """Each stream has one end and no gap, bounds hold, and nothing is left when all have ended."""
    folder = MEMORIES[memory](tmp_path / memory)
    model, tokenizer = load(folder), load_tokenizer(folder)
    served = Served(model, tokenizer, Constraints(tokenizer, model.vocab_size))
    seen: Counter[str] = Counter()

    @settings(max_examples=examples(4, few=4, in_ci=4))
    @given(programs(actions_min=40, actions_max=60))
    def check(program: list[Action]) -> None:
        seen.update(World(served).run(program))

    check()
    assert min(seen["finished"], seen["left"], seen["reused"]) > 0, seen
