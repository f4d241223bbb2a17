"""A short chat through a worker's socket; tests/soak has the long one, tests/bench its times."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.chat import chat, check_chat
from tests.support.chat_models import ARCHITECTURES
from tests.support.effort import spread_evenly
from tests.support.random_model import TINY
from tests.support.worker_process import running_worker

SHAPE = replace(TINY, context=1024)
TURNS = 4
SYSTEM_TOKENS = 400


@pytest.mark.asyncio
@pytest.mark.parametrize("architecture", spread_evenly(list(ARCHITECTURES), 2))
async def test_a_turn_costs_its_new_tokens(architecture: str, tmp_path: Path) -> None:
    """From the second turn on at most the new tokens and 64 are evaluated, and answers stay."""
    folder = ARCHITECTURES[architecture](tmp_path / architecture, SHAPE)
    async with running_worker() as worker:
        await worker.load(folder, context_length=SHAPE.context, rows_max=1)
        turns = await chat(worker.inference, turns=TURNS, system_tokens=SYSTEM_TOKENS)
        await check_chat(worker, turns)
