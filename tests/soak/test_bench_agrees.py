"""`mlxd bench` and `make bench` measure alike: on one model figures are within a twentieth."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from tests.bench.__main__ import CONTROLLER, PEER, all_ways, measure, random_llama
from tests.support.cli import start

PROMPT_TOKENS, NEW_TOKENS, RUNS = 128, 128, 5
WITHIN = 0.05
LIMIT_S = 600.0
TRIES = 3
"""Other work on the machine may fall on one of the two."""


async def figures_of_both(folder: Path) -> dict[str, tuple[float, float]]:
    """Return each figure by `mlxd bench` and by `make bench`."""
    sizes = ("--prompt", str(PROMPT_TOKENS), "--tokens", str(NEW_TOKENS), "--runs", str(RUNS))
    process = await start("bench", str(folder), *sizes, "--weights", "float32", "--json")
    out, err = await asyncio.wait_for(process.communicate(), LIMIT_S)
    assert process.returncode == 0, err.decode()
    report = json.loads(out)
    ours = {figure["way"]: figure["values"] for figure in report["figures"]}
    async with all_ways(folder, peers=(PEER,)) as ways:
        theirs = await measure(
            ways,
            prompt_tokens=PROMPT_TOKENS,
            new_tokens=NEW_TOKENS,
            runs=RUNS,
            vocabulary=4096,
        )
    both = {}
    for way, other in (("served", CONTROLLER), ("mlx-lm", PEER)):
        for name in ("prefill_tokens_per_s", "decode_tokens_per_s"):
            both[f"{way} {name}"] = (ours[way][name], getattr(theirs[other], name))
    return both


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.asyncio
async def test_figures_agree(tmp_path: Path) -> None:
    """Prefill and decoding, served and by mlx-lm, of one stream of a 100 MB Llama."""
    folder = await random_llama(tmp_path / "llama")
    for _ in range(TRIES):
        both = await figures_of_both(folder)
        apart = {name: ours / theirs for name, (ours, theirs) in both.items()}
        if all(abs(ratio - 1) <= WITHIN for ratio in apart.values()):
            return
    raise AssertionError(apart)
