"""`mlxd bench` and `make bench` measure alike: on one model figures are within a twentieth.

A process keeps for its life what its start gave it (which pages its weights got, for example), and
that alone moves a figure by more than a twentieth, mlx-lm's too. So both are started anew in every
round, in turns, and medians over the rounds are compared. What mlxd serves is judged; mlx-lm's
figures are printed beside it: both commands run the same process of mlx-lm, whose seven starts in
one command alone gave 715 to 887 tokens/s of prefill on a quiet machine.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from statistics import median

import pytest

from tests.bench.__main__ import CONTROLLER, PEER, all_ways, measure, random_llama
from tests.support.cli import start

PROMPT_TOKENS, NEW_TOKENS, RUNS = 128, 128, 5
ROUNDS = 7
WITHIN = 0.05
LIMIT_S = 600.0
WAYS = {"served": CONTROLLER, "mlx-lm": PEER}
JUDGED = "served"
NAMES = ("prefill_tokens_per_s", "decode_tokens_per_s")

Figures = dict[tuple[str, str], float]
"""By way and name, in tokens a second."""


async def figures_of_the_command(folder: Path) -> Figures:
    """Return what `mlxd bench` reports."""
    sizes = ("--prompt", str(PROMPT_TOKENS), "--tokens", str(NEW_TOKENS), "--runs", str(RUNS))
    process = await start("bench", str(folder), *sizes, "--weights", "float32", "--json")
    out, err = await asyncio.wait_for(process.communicate(), LIMIT_S)
    assert process.returncode == 0, err.decode()
    report = json.loads(out)
    values = {figure["way"]: figure["values"] for figure in report["figures"]}
    return {(way, name): values[way][name] for way in WAYS for name in NAMES}


async def figures_of_the_target(folder: Path) -> Figures:
    """Return what `make bench` measures."""
    async with all_ways(folder, peers=(PEER,)) as ways:
        measured = await measure(
            ways,
            prompt_tokens=PROMPT_TOKENS,
            new_tokens=NEW_TOKENS,
            runs=RUNS,
            vocabulary=4096,
        )
    return {(way, name): getattr(measured[WAYS[way]], name) for way in WAYS for name in NAMES}


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.asyncio
async def test_figures_agree(tmp_path: Path) -> None:
    """Prefill and decoding, served and by mlx-lm, of one stream of a 100 MB Llama."""
    folder = await random_llama(tmp_path / "llama")
    command: list[Figures] = []
    target: list[Figures] = []
    sides = [(figures_of_the_command, command), (figures_of_the_target, target)]
    for _ in range(ROUNDS):
        for figures_of, figures in sides:
            figures.append(await figures_of(folder))
        sides.reverse()
    apart = {key: _median(command, key) / _median(target, key) for key in command[0]}
    for key, ratio in apart.items():
        both = [[round(figures[key], 1) for figures in side] for side in (command, target)]
        sys.stdout.write(f"{key}: {ratio:.3f} of {both}\n")
    judged = {name: ratio for (way, name), ratio in apart.items() if way == JUDGED}
    assert all(abs(ratio - 1) <= WITHIN for ratio in judged.values()), judged


def _median(rounds: list[Figures], key: tuple[str, str]) -> float:
    return median(figures[key] for figures in rounds)
