"""Texts far beyond a context: they hold nobody up, and are refused for their length alone."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from tokenizers import Tokenizer as RawTokenizer

from mlxd.v1 import inference_pb2
from mlxd_shared.errors import InvalidRequest
from mlxd_shared.status import from_call
from mlxd_worker.tokenizer import Tokenizer
from tests.support.tiny_model import write_tiny_model
from tests.support.worker_process import WorkerProcess, running_worker
from tests.worker.made_tokenizers import byte_fallback, byte_level

CONTEXT = 64
TRIES = 20
TEXT = "once upon a time there was a little fox "


def tokenizer_of(raw: RawTokenizer) -> Tokenizer:
    """Return the worker's tokenizer over `raw`."""
    return Tokenizer(raw, bos_id=None, add_bos=None, eos_ids=())


def part_paused(tokenizer: Tokenizer) -> float:
    """Return for which part of the time a long text takes this thread stood still at once."""
    begun_s = last_s = time.perf_counter()
    pause_s = 0.0
    with ThreadPoolExecutor(1) as pool:
        job = pool.submit(tokenizer.encode, TEXT * 20_000)
        while not job.done():
            now_s = time.perf_counter()
            pause_s, last_s = max(pause_s, now_s - last_s), now_s
    return pause_s / (time.perf_counter() - begun_s)


def test_a_long_text_stops_no_other_thread() -> None:
    """The engine and the event loop go on meanwhile: no pause as long as half of the work."""
    tokenizer = tokenizer_of(byte_level())
    # A machine that stands still pauses this thread now and then, a text that stops it each time.
    assert any(part_paused(tokenizer) < 0.5 for _ in range(TRIES))


@pytest.mark.parametrize("raw", [byte_level(), byte_fallback()], ids=["level", "fallback"])
def test_no_id_stands_for_more_characters_than_the_longest_piece(raw: RawTokenizer) -> None:
    """So that the length of a text alone can tell that it is too long."""
    tokenizer = tokenizer_of(raw)
    longest = max(len(tokenizer.token_text(i) or "") for i in range(tokenizer.vocab_size))
    assert tokenizer.piece_chars_max == longest
    for text in (TEXT, "caf\u00e9 \u65e5\u672c", "a" * 100):
        assert len(text) <= longest * len(tokenizer.encode(text))


async def refusal(worker: WorkerProcess, text: str) -> str:
    """Return what is wrong with a text."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await anext(aiter(worker.inference.Generate(inference_pb2.GenerateRequest(text=text))))
    error = from_call(caught.value)
    assert isinstance(error, InvalidRequest)
    (violation,) = error.violations
    assert violation.field == "text"
    return violation.description


@pytest.mark.asyncio
async def test_a_text_beyond_every_context_is_not_tokenised(tmp_path: Path) -> None:
    """Its length alone tells; a text that might fit is counted in tokens."""
    async with running_worker() as worker:
        await worker.load(write_tiny_model(tmp_path / "m", context_max=CONTEXT))
        assert "1000000 characters" in await refusal(worker, "a" * 1_000_000)
        counted = await refusal(worker, "a" * (2 * CONTEXT))
        assert f"tokens; the context of {CONTEXT} takes at most" in counted
