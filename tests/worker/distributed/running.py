"""How a test runs mixed streams over ranks, and holds their tokens to those of one."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlxd_shared
from mlxd_shared.domain.requests import FinishReason
from tests.worker.distributed.holding import SOUND
from tests.worker.distributed.rank_run import HELD
from tests.worker.fresh_process import environment
from tests.worker.kin import change, write_quantised

DEMO = Path(mlxd_shared.__file__).parent / "demo_model"
RUN_S = 500.0
"""Ranks wait for each other by turning: with more of them than processors a step takes long."""

CANCELLED = "3"
"""The stream that is cancelled on the way, wherever it then is."""


def start(ranks: int, out: Path, *more: str, model: Path = DEMO) -> subprocess.Popen[str]:
    """Start mixed streams over so many ranks; `more`: as `rank_run` has it."""
    name = "tests.worker.distributed.rank_run"
    return subprocess.Popen(
        [sys.executable, "-m", name, str(ranks), str(out), str(model), *more],
        env=environment(MLXD_BLAS_THREADS="1"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run_streams(ranks: int, out: Path, *more: str, model: Path = DEMO) -> Any:
    """Run to the end, and return what was written."""
    process = start(ranks, out, *more, model=model)
    _, errors = process.communicate(timeout=RUN_S)
    assert process.returncode == 0, errors
    return json.loads(out.read_text())


def assert_equal_streams(alone: Any, together: Any, *, most: int = 1 << 20) -> None:
    """Assert that ranks drew what one process did, of the streams that both had, up to `most`."""
    assert not alone["errors"]
    assert not together["errors"]
    for number, ids in together["ids"].items():
        expected = alone["ids"][number][:most]
        assert ids, number
        least = min(len(ids), len(expected)) if number == CANCELLED else None
        assert ids[:least] == expected[:least], number


def assert_held(run: Any) -> None:
    """Assert that constraints were in force: what they have ended is whole; of every kind one is.

    Of the streams in which calls may begin it is one in which a call did, and ended.
    """
    sound = set()
    for number, kind in HELD.items():
        text, reason = run["texts"][str(number)], run["reasons"][str(number)]
        whole = SOUND[kind](text)
        assert whole or kind == "calls" or reason != FinishReason.EOS.name, (number, text)
        sound |= {kind} if whole else set()
    assert sound == set(SOUND)


def write_readable(folder: Path, config: Mapping[str, Any], **settings: Any) -> Path:
    """Write a model that `write_quantised` makes, with the tokenizer of the demo model."""
    vocab = json.loads((DEMO / "config.json").read_text())["vocab_size"]
    write_quantised(folder, change(config, vocab_size=vocab), **settings)
    for file in DEMO.glob("tokenizer*"):
        shutil.copy(file, folder)
    return folder
