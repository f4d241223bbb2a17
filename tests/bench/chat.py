"""What a turn of a chat costs: tokens evaluated, and its first token against a full prompt's.

Measured at a worker's own socket: the same prompt with the prefix cache as the chat left it, and
with the cache cleared.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.bench.report import json_line
from tests.support.chat import TURNS, ask, chat, check_same, forget
from tests.support.worker_process import running_worker

ARCHITECTURES = ("llama", "sliding", "hybrid")
WIDTHS = ("demo", "100MB")
CONTEXT = 8192
FULL_EVERY = 3
"""Of the turns from the second on, every so manieth is timed with the cache cleared, too."""
SETTLING_SEED = 99


@dataclass(frozen=True, slots=True)
class ChatFigures:
    """Medians over the turns from the second on, but for `evaluated_max`."""

    evaluated_max: int
    ttft_s: float
    full_ttft_s: float
    ttft_ratio: float


async def chat_lines(folder: Path, *, widths: tuple[str, ...] = WIDTHS) -> list[str]:
    """Measure every architecture at these widths; return JSON lines."""
    lines: list[str] = []
    for width in widths:
        for architecture in ARCHITECTURES:
            model = folder / f"{architecture}-{width}"
            await _write(model, architecture, width)
            figures = await measure(model)
            sys.stderr.write(
                f"chat, {architecture}, {width}: at most {figures.evaluated_max} tokens a turn, "
                f"first token {figures.ttft_s * 1e3:.1f} ms of {figures.full_ttft_s * 1e3:.1f} ms "
                f"({figures.ttft_ratio:.3f})\n"
            )
            lines += _lines(figures, f"chat.{architecture}.{width}")
    return lines


def _lines(figures: ChatFigures, prefix: str) -> Iterator[str]:
    for name, value in asdict(figures).items():
        yield json_line("chat", key=f"{prefix}.{name}", value=value)


async def _write(folder: Path, architecture: str, width: str) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.support.chat_models", str(folder), architecture, width)
    )
    if await process.wait():
        message = f"the {architecture} model could not be written"
        raise RuntimeError(message)


async def measure(model: Path) -> ChatFigures:
    """Hold one chat and ask some of its prompts again with the cache cleared."""
    async with running_worker() as worker:
        await worker.load(model, context_length=CONTEXT, rows_max=1)
        await chat(worker.inference, seed=SETTLING_SEED, turns=2)
        turns = (await chat(worker.inference, turns=TURNS))[1:]
        ratios, full_s = [], []
        for turn in turns[::FULL_EVERY]:
            await check_same(worker, turn)
            await forget(worker)
            full = await ask(worker.inference, turn.prompt, max_tokens=1)
            assert full.cached == 0
            full_s.append(full.first_token_s)
            ratios.append(turn.first_token_s / full.first_token_s)
    return ChatFigures(
        evaluated_max=max(turn.evaluated for turn in turns),
        ttft_s=statistics.median(turn.first_token_s for turn in turns),
        full_ttft_s=statistics.median(full_s),
        ttft_ratio=statistics.median(ratios),
    )
