"""One model over ranks on a CPU: tokens as of one rank, and a group that ends as one.

More ranks and longer streams are in `tests/soak/test_ranks.py`.
"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from mlxd_worker.process.exit_code import ExitCode
from tests.worker.distributed.running import (
    RUN_S,
    assert_equal_streams,
    assert_held,
    run_streams,
    start,
    write_readable,
)
from tests.worker.kin import QWEN3_MOE, change


@pytest.mark.timeout(3 * RUN_S)
def test_tokens_are_those_of_one_rank(tmp_path: Path) -> None:
    """24 mixed streams draw what one process draws, but for one that is cancelled on the way; over
    four ranks three short ones do. Some have a format, or calls, one of them with masks that come
    when all others have ended. Layers are divided: a rank of several holds well below what one
    process does.
    """
    alone = run_streams(1, tmp_path / "1")
    two = run_streams(2, tmp_path / "2")
    assert len(two["ids"]) == 24
    assert_equal_streams(alone, two)
    assert_held(two)
    assert two["nbytes"] < 0.65 * alone["nbytes"]
    four = run_streams(4, tmp_path / "4", "--streams", "3", "--tokens", "6")
    assert len(four["ids"]) == 3
    assert_equal_streams(alone, four, most=6)
    assert four["nbytes"] < 0.45 * alone["nbytes"]


@pytest.mark.timeout(2 * RUN_S)
def test_packed_experts_draw_the_tokens_of_one_rank(tmp_path: Path) -> None:
    """Experts in 4 bits stay so, divided inside."""
    config = change(QWEN3_MOE, num_hidden_layers=2, moe_intermediate_size=64)
    model = write_readable(tmp_path / "model", config)
    options = ("--streams", "6", "--tokens", "12", "--weights", "stored")
    alone = run_streams(1, tmp_path / "1", *options, model=model)
    two = run_streams(2, tmp_path / "2", *options, model=model)
    assert_equal_streams(alone, two)
    assert two["nbytes"] < alone["nbytes"]


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGKILL, ExitCode.RANK_KILLED), (signal.SIGSTOP, ExitCode.ENGINE_FAILED)],
)
def test_a_lost_follower_ends_the_group(
    tmp_path: Path, number: signal.Signals, code: ExitCode
) -> None:
    """Where a follower dies or stands still, its leader ends by itself, before it is done; a stream
    with a format is on its way then.
    """
    process = start(2, tmp_path / "out", "--hit", "20", str(int(number)))
    assert process.stdout is not None
    assert "hit\n" in iter(process.stdout.readline, "")
    _, errors = process.communicate(timeout=RUN_S)
    assert process.returncode == code, errors
    assert not (tmp_path / "out").exists()
