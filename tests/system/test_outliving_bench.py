"""The bench of prompts that outlive a model, at tiny sizes: it runs to its end, and it compares."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pytest

from tests.bench.outliving_kinds import check_same
from tests.bench.outliving_server import Answer
from tests.support.cli import clean_environment

ROOT = Path(__file__).parents[2]
KINDS = ("standard", "hybrid")
SIZES = (
    *("--tokens", "768", "--shape", "tiny", "--runs", "1", "--steps", "110"),
    *("--moved", "100000", "--rounds", "1", "--kinds", *KINDS),
)
ENDS = ("unload", "eviction", "kill", "restart")


@pytest.mark.soak
@pytest.mark.asyncio
async def test_every_part_runs_to_its_end(tmp_path: Path) -> None:
    """All four parts: each end of a worker, others' steps, decoding alone, kinds of memory."""
    out = tmp_path / "figures"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.bench.outliving", *SIZES, "--out", str(out)),
        cwd=ROOT,
        env=clean_environment(),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await process.communicate()
    assert process.returncode == 0, output.decode()

    lines = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert lines[0]["kind"] == "machine"
    figures = {line["key"]: line["value"] for line in lines[1:]}
    for name in ("memory", *ENDS):
        of_cold = figures[f"first_token_s.{name}"] / figures["first_token_s.cold"]
        assert figures[f"first_token_of_cold.{name}"] == pytest.approx(of_cold)
    for kind in KINDS:
        assert [figures[f"kinds.{kind}.{end}.read_tokens"] for end in ENDS] == [256.0] * 4
    for name in ("alone", "reading", "writing"):
        assert figures[f"steps_p99_ms.{name}"] >= figures[f"steps_p50_ms.{name}"] > 0
    assert figures["decode_step.on_of_off"] > 0


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (Answer(0.1, (1, 2, 4), cached=256), "other tokens"),
        (Answer(0.1, (1, 2), cached=256), "other tokens"),
        (Answer(0.1, (1, 2, 3), cached=0), "nothing was read"),
    ],
)
def test_another_token_ends_the_bench(answer: Answer, problem: str) -> None:
    """So does a prompt that was computed again: its time would say nothing of the disk."""
    cold = Answer(1.0, (1, 2, 3), cached=0)
    check_same("kill", Answer(0.1, (1, 2, 3), cached=256), cold)
    with pytest.raises(RuntimeError, match=f"kill: {problem}"):
        check_same("kill", answer, cold)
