"""The bench of the served path runs from end to end, also where its figures mean nothing."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from asyncio.subprocess import PIPE
from pathlib import Path

import pytest

from mlxd_controller.bench.requests import GRPC, SETTLED, Job, Request, job_to_json
from mlxd_shared.ops.measuring import outcomes_from_json
from tests.bench.prompts import Prompts
from tests.bench.server import DEMO
from tests.bench.serving import Load, arguments, put_spread, run
from tests.bench.sides import Side, put_load
from tests.support.served import serve


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


@pytest.mark.asyncio
async def test_generators_begin_together_or_none_does() -> None:
    """Each waits, once it has settled, for the word, and ends where nobody says it."""
    request = Request("Once", prompt_tokens=3, max_tokens=4)
    async with serve("--model", f"demo={DEMO}") as server:
        job = Job(GRPC, server.address, "demo", (request,), (request,) * 2, 2, together=True)
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.bench.load"), stdin=PIPE, stdout=PIPE
        )
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(job_to_json(job))
        assert await process.stdout.readline() == f"{SETTLED}\n".encode()
        told_s = time.perf_counter()
        out, _ = await process.communicate(b"\n")
        assert all(outcome.sent_s > told_s for outcome in outcomes_from_json(out))
        barrier = asyncio.Barrier(2)
        sides = [Side(GRPC, server.address, model) for model in ("demo", "nobody")]
        loads = [put_load(s, [request], settling=[request], together=barrier) for s in sides]
        with pytest.raises(ExceptionGroup):
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(load) for load in loads]
        assert tasks[0].cancelled(), "it does not wait for one that never settles"

        ran = await put_spread(Side(GRPC, server.address, "demo"), [request] * 6, clients=3)
        assert [outcome.tokens for outcome in ran.outcomes] == [4] * 6
        with pytest.raises(RuntimeError, match="ended with code"):
            await put_spread(Side(GRPC, server.address, "nobody"), [request] * 6, clients=3)


def test_prompts_with_a_common_beginning_have_the_length_that_they_say() -> None:
    """And nothing in common beyond it."""
    prompts = Prompts(DEMO, seed=1)
    one, other = Load("common", 2, 1, prompt=9, new=4, common=20).requests(prompts)

    ids = [prompts.ids(request.text) for request in (one, other)]

    assert [len(each) for each in ids] == [29, 29]
    assert one.prompt_tokens == other.prompt_tokens == 29
    assert ids[0][:20] == ids[1][:20]
    assert ids[0][20:] != ids[1][20:]
