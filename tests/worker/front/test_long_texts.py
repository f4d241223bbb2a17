"""Texts far beyond a context: they hold nobody up, and are refused for their length alone."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from tokenizers import Tokenizer as RawTokenizer

from mlxd.v1 import inference_pb2
from mlxd_shared import config
from mlxd_shared.domain.errors import InvalidRequest, QueueFull
from mlxd_shared.wire.status import from_call
from mlxd_worker.text.tokenizer import Tokenizer
from tests.support.tiny_model import write_tiny_model
from tests.support.worker_process import DIGEST, WorkerProcess, running_worker
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


async def trouble(call: Awaitable[object]) -> tuple[str, str]:
    """Return the one field that a call is refused for, and why."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    error = from_call(caught.value)
    assert isinstance(error, InvalidRequest)
    (violation,) = error.violations
    return violation.field, violation.description


@pytest.mark.asyncio
async def test_tokenize_and_detokenize_are_bounded_like_prompts(tmp_path: Path) -> None:
    """A text that no context of the model holds is not read; ids and texts in bounds are whole."""
    pb = inference_pb2
    async with running_worker() as worker:
        await worker.load(write_tiny_model(tmp_path / "m", context_max=8192))
        ask, back = worker.inference.Tokenize, worker.inference.Detokenize
        field, description = await trouble(ask(pb.TokenizeRequest(text="a" * 4_000_000)))
        assert (field, "4000000 characters; the context of 8192" in description) == ("text", True)
        field, description = await trouble(
            back(pb.DetokenizeRequest(token_ids=[5] * 70_000 + [999]))
        )
        assert (field, "999 is not a token id" in description) == ("token_ids", True)

        text = TEXT * 2000
        answer = await ask(pb.TokenizeRequest(text=text))
        ids = answer.token_ids
        assert answer.model_digest == DIGEST
        assert len(ids) > config.TOKENIZE_SHORT_IDS_MAX
        again = await back(pb.DetokenizeRequest(token_ids=[*ids] * 3))
        assert (again.text, again.model_digest) == (text * 3, DIGEST)
        embedded = await worker.inference.Embed(pb.EmbedRequest(texts=[TEXT]))
        assert embedded.prompt_tokens == len((await ask(pb.TokenizeRequest(text=TEXT))).token_ids)


@pytest.mark.asyncio
async def test_a_flood_of_long_texts_is_refused_beyond_its_account(tmp_path: Path) -> None:
    """One is read, as many wait as their bytes allow, the rest come again; short ones go on."""
    text = "a " * (4 * 1024 * 1024)
    floods = 2 + config.TOKENIZE_WAITING_BYTES_MAX // len(text)
    async with running_worker() as worker:
        await worker.load(write_tiny_model(tmp_path / "m", context_max=1 << 19))
        request = inference_pb2.TokenizeRequest(text=text)
        calls = [worker.inference.Tokenize(request) for _ in range(floods)]
        tasks = [asyncio.ensure_future(_ending_of(call)) for call in calls]
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        refused = next(iter(done)).result()
        assert isinstance(refused, QueueFull)
        assert refused.queue == "bytes of long texts to tokenise"
        assert refused.retry_after_s > 0
        short = await worker.inference.Tokenize(inference_pb2.TokenizeRequest(text=TEXT))
        assert short.token_ids
        for call in calls:
            call.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        last = await worker.inference.Tokenize(inference_pb2.TokenizeRequest(text=TEXT * 2000))
        assert len(last.token_ids) - 1 == 2000 * (len(short.token_ids) - 1)  # but for BOS


async def _ending_of(call: Awaitable[object]) -> Exception | None:
    """Return what a call was refused for; None where it came to something else."""
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return from_call(error)
    return None
