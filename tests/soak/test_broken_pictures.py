"""500 files that are no pictures, sent to a served model while others ask it: each is refused.

`python -m pytest -m soak tests/soak/test_broken_pictures.py -s` prints the gaps of docs/evidence.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from mlxd import Client, SamplingOptions
from tests.support.seeing_models import SEEING
from tests.support.served import serve

NAME = "m"
FILES = 500
AT_ONCE = 4
LISTENED = 400
"""Tokens of each stream that is listened to."""
QUIET_STREAMS = 12
FIELD = "chat.messages[0].parts[0]."
SENDER = ("-m", "tests.support.refused_sender")


async def listen(client: Client, gaps_s: list[float]) -> None:
    """Hear one stream of text to its end; add the gaps between its messages."""
    sampling = SamplingOptions(temperature=1.0, seed=3)
    before_s = 0.0
    async with client.generate(
        "Once upon a time", model=NAME, sampling=sampling, max_tokens=LISTENED, ignore_eos=True
    ) as stream:
        async for _ in stream:
            now_s = time.monotonic()
            if before_s:
                gaps_s.append(now_s - before_s)
            before_s = now_s


async def send_files(address: str) -> list[tuple[str, str]]:
    """Send the files from a process of its own; return each refusal's field and sentence."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, *SENDER, address, NAME, str(FILES), str(AT_ONCE)),
        stdout=asyncio.subprocess.PIPE,
    )
    out, _ = await process.communicate()
    assert process.returncode == 0
    return [(field, description) for field, description in json.loads(out)]


def describe_gaps(name: str, gaps_s: Sequence[float]) -> str:
    """Return a row of the table: gaps in milliseconds."""
    ordered = sorted(gaps_s)
    at = (ordered[len(ordered) * share // 1000] * 1e3 for share in (500, 990, 999))
    shown = ", ".join(f"{value:.2f}" for value in at)
    return f"{name}: {len(ordered)} gaps, p50, p99, p99.9 {shown}, most {ordered[-1] * 1e3:.2f} ms"


async def worker_of(client: Client) -> str:
    """Return which worker serves the model."""
    (model,) = await client.models()
    return model.worker_incarnation


@pytest.mark.asyncio
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("family", SEEING)
async def test_no_file_holds_others_up(family: str, tmp_path: Path) -> None:
    """A refusal of the file's own field for each; the gaps of a stream beside them are printed,
    with its gaps before. They are not judged: on a busy machine they say nothing of us."""
    folder = SEEING[family](tmp_path / family)
    quiet_s: list[float] = []
    beside_s: list[float] = []
    async with serve("--model", f"{NAME}={folder}") as server, Client(server.address) as client:
        for _ in range(QUIET_STREAMS):
            await listen(client, quiet_s)
        worker = await worker_of(client)
        sending = asyncio.create_task(send_files(server.address))
        while not sending.done():
            await listen(client, beside_s)
        refusals = await sending
        await listen(client, quiet_s)
        assert await worker_of(client) == worker, "the worker is still the same"
    assert len(refusals) == FILES
    assert all(field.startswith(FIELD) and description for field, description in refusals)
    for name, gaps_s in (("undisturbed", quiet_s), (f"beside {FILES} files", beside_s)):
        sys.stderr.write(f"\n{family}, {describe_gaps(name, gaps_s)}")
    sys.stderr.write("\n")
