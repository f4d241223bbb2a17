"""24 mixed streams over two and four ranks, of models in every form: the tokens of one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.worker.distributed.running import (
    DEMO,
    RUN_S,
    assert_equal_streams,
    run_streams,
    write_readable,
)
from tests.worker.kin import GPT_OSS, QWEN3, QWEN3_MOE, change

WIDTHS: Mapping[str, Any] = {
    "num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 256,
}  # fmt: skip
MOE = change(QWEN3_MOE, **WIDTHS, moe_intermediate_size=256)
MXFP4: Mapping[str, Any] = {"bits": 4, "mode": "mxfp4", "group": 32}


@pytest.mark.timeout(3 * RUN_S)
@pytest.mark.parametrize(
    ("write", "weights"),
    [
        (lambda _: DEMO, "auto"),
        (lambda _: DEMO, "nvfp4"),
        (lambda folder: write_readable(folder, change(QWEN3, **WIDTHS), bits=8), "stored"),
        (lambda folder: write_readable(folder, MOE), "stored"),
        (lambda folder: write_readable(folder, change(GPT_OSS, **WIDTHS), **MXFP4), "stored"),
    ],
    ids=["numbers", "packed on loading", "8 bits", "experts", "sinks"],
)
def test_tokens_are_those_of_one_rank(
    write: Callable[[Path], Path], weights: str, tmp_path: Path
) -> None:
    """All of them, but for one that is cancelled on the way."""
    model = write(tmp_path / "model")
    alone = run_streams(1, tmp_path / "1", "--weights", weights, model=model)
    for ranks in (2, 4):
        together = run_streams(ranks, tmp_path / f"{ranks}", "--weights", weights, model=model)
        assert len(together["ids"]) == 24
        assert_equal_streams(alone, together)
