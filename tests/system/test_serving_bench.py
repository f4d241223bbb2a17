"""The bench of the served path runs from end to end, also where its figures mean nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.bench.prompts import Prompts
from tests.bench.server import DEMO
from tests.bench.serving import Load, arguments, run


@pytest.mark.asyncio
async def test_every_figure_that_a_gpu_is_judged_by_is_reported(tmp_path: Path) -> None:
    """Loop and served path on one model, and each stream's text is the same as alone."""
    argv = ["--device", "cpu", "--models", "tiny", "--clients", "1", "3", "--runs", "1"]

    lines = await run(arguments([*argv, "--no-peer"]), tmp_path)

    values = {line["key"]: line["value"] for line in map(json.loads, lines[1:])}
    for load in ("closed.1", "closed.3", "burst.3", "common.3"):
        assert values[f"serving.tiny.{load}.tokens_per_s"] > 0
        assert values[f"serving.tiny.{load}.generator_cores"] > 0
        p50, p99 = (values[f"serving.tiny.{load}.ttft_{which}_s"] for which in ("p50", "p99"))
        assert p99 >= p50 > 0
    of_loop = values["serving.tiny.closed.3.of_loop"]
    loop = values["serving.tiny.closed.3.loop_decode_tokens_per_s"]
    assert abs(of_loop * loop - values["serving.tiny.closed.3.tokens_per_s"]) < 1e-6 * loop
    assert values["serving.tiny.as_alone"] == 1.0
    assert values["serving.tiny.ready.second_s"] > 0


def test_prompts_with_a_common_beginning_have_the_length_that_they_say() -> None:
    """And nothing in common beyond it."""
    prompts = Prompts(DEMO, seed=1)
    one, other = Load("common", 2, 1, prompt=9, new=4, common=20).requests(prompts)

    ids = [prompts.ids(request.text) for request in (one, other)]

    assert [len(each) for each in ids] == [29, 29]
    assert one.prompt_tokens == other.prompt_tokens == 29
    assert ids[0][:20] == ids[1][:20]
    assert ids[0][20:] != ids[1][20:]
