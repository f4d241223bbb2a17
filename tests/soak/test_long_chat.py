"""A chat of 20 turns over a 2,000-token system prompt, each turn asked again without the cache."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.chat import TURNS, chat, check_chat
from tests.support.chat_models import ARCHITECTURES, WIDTHS
from tests.support.worker_process import running_worker

SHAPE = WIDTHS["demo"]


@pytest.mark.asyncio
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
async def test_twenty_turns(architecture: str, tmp_path: Path) -> None:
    """From the second turn on at most the new tokens and 64 are evaluated, and answers stay."""
    folder = ARCHITECTURES[architecture](tmp_path / architecture, SHAPE)
    async with running_worker() as worker:
        await worker.load(folder, context_length=SHAPE.context, rows_max=1)
        turns = await chat(worker.inference)
        assert len(turns) == TURNS
        await check_chat(worker, turns)
