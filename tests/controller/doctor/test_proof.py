"""A proof is heard to its end, however that comes, and told of in a few lines."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from mlxd_controller.doctor.facts import Finding, State
from mlxd_controller.doctor.proof import Ended, judge_proof, run_proof
from mlxd_shared.domain.fast_paths import FastPath
from mlxd_shared.ops.findings import Proved

LAST = {"device": "cpu: x", "versions": {"mlx": "1"}, "off": {"lanes": "wrong"}}
GOOD = {"check": "fast path lanes", "subject": "A", "problem": "", "off": None}
BAD = {"check": "fast path lanes", "subject": "B", "problem": "off by 1", "off": "lanes"}
PRODUCT = {**GOOD, "check": "products with packed weights"}
SPEED = {**GOOD, "check": "speed of lanes"}
BLAS = {"blas": "openblas", "version": "0.3", "threads": 2, "reason": "first"}


def script(*lines: object, end: str = "") -> Sequence[str]:
    """Return a process that writes these lines and then does `end`."""
    text = "".join(f"{json.dumps(line)}\n" for line in lines)
    code = f"import os, signal, sys\nsys.stdout.write({text!r})\nsys.stdout.flush()\n{end}"
    return (sys.executable, "-c", code)


async def run(*lines: object, end: str = "", silent_max_s: float = 60.0) -> Ended:
    """Run such a process as a proof."""
    steps: list[str] = []
    command = script(*lines, end=end)
    ended = await run_proof(
        [], quick=False, on_step=steps.append, command=command, silent_max_s=silent_max_s
    )
    assert steps == [line["trying"] for line in ended.lines if "trying" in line]
    return ended


@pytest.mark.asyncio
async def test_what_a_proof_says_is_told_in_a_line_a_check() -> None:
    """Problems one by one, what went well together; at the end stands what is remembered."""
    products = [PRODUCT, {**PRODUCT, "subject": "B"}]
    families = [GOOD, BAD, {**GOOD, "subject": "C"}]
    verdict = judge_proof(await run(BLAS, {"trying": "a"}, *products, *families, SPEED, LAST))

    assert verdict.findings == (
        Finding("BLAS", State.FINE, "openblas 0.3, 2 threads: first"),
        Finding("products with packed weights", State.FINE, "2 of 2"),
        Finding("fast path lanes", State.FAULT, "B: off by 1; lanes is switched off"),
        Finding("fast path lanes", State.FINE, "2 of 3"),
        Finding("speed of lanes", State.FINE, "A"),
        Finding("device", State.FINE, "cpu: x"),
    )
    assert verdict.proved == Proved("cpu: x", {"mlx": "1"}, {FastPath.LANES: "wrong"})


@pytest.mark.parametrize(
    ("end", "said"),
    [
        ("os.kill(os.getpid(), signal.SIGSEGV)", "ended by SIGSEGV at lanes on A"),
        ("raise ValueError('no such thing')", "failed at lanes on A: ValueError: no such thing"),
        ("signal.pause()", "said nothing more at lanes on A"),
    ],
)
@pytest.mark.asyncio
async def test_a_proof_that_dies_is_a_fault_at_what_it_tried(end: str, said: str) -> None:
    """What it has said before stands, and nothing is remembered."""
    silent_max_s = 3.0 if "pause" in end else 60.0
    ended = await run(GOOD, {"trying": "lanes on A"}, end=end, silent_max_s=silent_max_s)
    verdict = judge_proof(ended)

    assert verdict.proved is None
    assert [each.state for each in verdict.findings] == [State.FINE, State.FAULT]
    assert said in verdict.findings[1].text


def test_a_proof_that_is_killed_leaves_no_models_behind() -> None:
    """What it has written is gone, though it could not see to that."""
    end = (
        "import json, os, signal, tempfile\n"
        "folder = tempfile.mkdtemp()\n"
        "print(json.dumps({'error': folder}), flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    ended = asyncio.run(run(end=end))

    (line,) = ended.lines
    assert ended.exit_code == -signal.SIGKILL
    assert not Path(line["error"]).exists()


def test_a_backend_that_cannot_be_used_and_a_slow_blas_are_faults() -> None:
    """Each with the worker's own words."""
    slow = {**BLAS, "blas": "reference", "reason": "none works"}
    verdict = judge_proof(Ended(({"error": "no backend"}, slow)))

    assert [each.state for each in verdict.findings] == [State.FAULT, State.FAULT]
    assert [each.check for each in verdict.findings] == ["BLAS", "engine"]
    assert verdict.proved is None


@pytest.mark.asyncio
async def test_models_whose_tokenizers_are_read_are_named_to_the_proof(tmp_path: Path) -> None:
    """And whether it is to be quick."""
    code = "import json, sys\nprint(json.dumps({'trying': sys.argv[1:]}))"
    command = (sys.executable, "-c", code)
    heard: list[object] = []
    await run_proof([tmp_path], quick=True, on_step=heard.append, command=command)

    assert heard == [["--quick", "--tokenizer", str(tmp_path)]]
