"""500 files that are no pictures, sent to a served model while others ask it: each is refused.

`python -m pytest -m soak tests/soak/test_broken_pictures.py -s` prints the gaps of docs/evidence.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import grpc
import pytest

from mlxd.v1 import inference_pb2, types_pb2
from mlxd_shared.domain.errors import InvalidRequest
from mlxd_shared.wire.status import from_call
from tests.support.broken_pictures import refused_files
from tests.support.seeing_models import SEEING
from tests.support.struck import NAME, Struck, struck_controller

FILES = 500
AT_ONCE = 4
LISTENED = 400
"""Tokens of each stream that is listened to."""
QUIET_STREAMS = 12
FIELD = "chat.messages[0].parts[0]."
Part = inference_pb2.ContentPart


async def listen(struck: Struck, gaps_s: list[float]) -> None:
    """Hear one stream of text to its end; add the gaps between its messages."""
    request = inference_pb2.GenerateRequest(
        model=NAME,
        text="Once upon a time",
        sampling=types_pb2.SamplingOptions(temperature=1.0, seed=3),
        max_tokens=LISTENED,
        ignore_eos=True,
    )
    before_s, tokens = 0.0, 0
    async for message in struck.inference.Generate(request):
        now_s = time.monotonic()
        if before_s:
            gaps_s.append(now_s - before_s)
        before_s = now_s
        tokens += len(message.token_ids)
    assert tokens == LISTENED


async def show(struck: Struck, content: bytes, media_type: str) -> str:
    """Show a file that is no picture; return why it is refused."""
    parts = [Part(image=content, media_type=media_type), Part(text="what is it?")]
    request = inference_pb2.GenerateRequest(
        model=NAME,
        chat=inference_pb2.ChatPrompt(
            messages=[inference_pb2.ChatMessage(role="user", parts=parts)]
        ),
        max_tokens=1,
    )
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in struck.inference.Generate(request):
            pass
    error = from_call(caught.value)
    assert isinstance(error, InvalidRequest), error
    (violation,) = error.violations
    assert violation.field.startswith(FIELD)
    return violation.description


def describe_gaps(name: str, gaps_s: Sequence[float]) -> str:
    """Return a row of the table: gaps in milliseconds."""
    ordered = sorted(gaps_s)
    at = (ordered[len(ordered) * share // 1000] * 1e3 for share in (500, 990, 999))
    shown = ", ".join(f"{value:.2f}" for value in at)
    return f"{name}: {len(ordered)} gaps, p50, p99, p99.9 {shown}, most {ordered[-1] * 1e3:.2f} ms"


@pytest.mark.asyncio
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("family", SEEING)
async def test_no_file_holds_others_up(family: str, tmp_path: Path) -> None:
    """A refusal of the file's own field for each; the gaps of a stream beside them are printed,
    with its gaps before. They are not judged: on a busy machine they say nothing of us."""
    files = refused_files(FILES)
    folder = SEEING[family](tmp_path / family)
    quiet_s: list[float] = []
    beside_s: list[float] = []
    async with struck_controller(folder, module="mlxd_worker") as struck:
        for _ in range(QUIET_STREAMS):
            await listen(struck, quiet_s)
        left = iter(files)
        reasons: list[str] = []

        async def send() -> None:
            for content, media_type in left:
                reasons.append(await show(struck, content, media_type))

        sending = asyncio.gather(*(send() for _ in range(AT_ONCE)))
        while not sending.done():
            await listen(struck, beside_s)
        await sending
        pid = struck.pid
        await listen(struck, quiet_s)
        assert struck.pid == pid, "the worker is still the same"
    assert len(reasons) == FILES
    assert all(reasons)
    for name, gaps_s in (("undisturbed", quiet_s), (f"beside {FILES} files", beside_s)):
        sys.stderr.write(f"\n{family}, {describe_gaps(name, gaps_s)}")
    sys.stderr.write("\n")
