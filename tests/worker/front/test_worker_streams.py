"""Streams from a real worker process over gRPC, on a tiny model."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
from tokenizers import Tokenizer

from mlxd.v1 import inference_pb2, status_pb2, types_pb2
from mlxd_shared.domain.errors import (
    DuplicateRequest,
    InvalidRequest,
    MlxdError,
    ModelNotFound,
    QueueFull,
    WrongWorker,
)
from mlxd_shared.wire.status import from_call
from mlxd_worker.front.streams import RETRY_MIN_S
from tests.support.tiny_model import VOCAB, write_tiny_model
from tests.support.worker_process import DIGEST, WorkerProcess, running_worker
from tests.worker.made_tokenizers import EOS_ID

pytestmark = pytest.mark.asyncio(loop_scope="module")

CONTEXT = 4096
"""Takes a stream more than a second to fill, so that one may be met before its end."""
ROWS = 4
WAITING = 40
CLOCK_S = 1e-6
"""How exactly a difference of two times of the clock is told."""
BEYOND = "<beyond the model>"
GREEDY = types_pb2.SamplingOptions(temperature=0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model whose tokenizer has one token more than the model, as some do."""
    folder = write_tiny_model(tmp_path_factory.mktemp("tiny"), context_max=CONTEXT)
    file = str(folder / "tokenizer.json")
    tokenizer = Tokenizer.from_file(file)
    tokenizer.add_tokens([f"<spare {n}>" for n in range(VOCAB - tokenizer.get_vocab_size())])
    tokenizer.add_tokens([BEYOND])
    tokenizer.save(file)
    return folder


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def worker(folder: Path) -> AsyncIterator[WorkerProcess]:
    """One worker for the whole file: after each refusal the next request must succeed."""
    async with running_worker("--waiting-max", str(WAITING)) as process:
        await process.load(folder, rows_max=ROWS)
        yield process


def request_of(**fields: Any) -> inference_pb2.GenerateRequest:
    """Return a greedy request of 12 tokens unless told otherwise."""
    request = inference_pb2.GenerateRequest(**fields)
    if request.WhichOneof("prompt") is None:
        request.text = "once upon a time"
    if not request.HasField("sampling"):
        request.sampling.CopyFrom(GREEDY)
    if not request.HasField("max_tokens") and not request.HasField("num_predict"):
        request.max_tokens = 12
    if not request.HasField("ignore_eos"):
        request.ignore_eos = True
    return request


async def generate(worker: WorkerProcess, **fields: Any) -> list[inference_pb2.GenerateResponse]:
    """Return every message of one stream."""
    return [message async for message in worker.inference.Generate(request_of(**fields))]


def ids_of(messages: list[inference_pb2.GenerateResponse]) -> list[int]:
    """Return all token ids."""
    return [i for message in messages for i in message.token_ids]


def text_of(messages: list[inference_pb2.GenerateResponse]) -> str:
    """Return all text."""
    return "".join(message.text for message in messages)


async def refusal(worker: WorkerProcess, **fields: Any) -> MlxdError:
    """Return the error of a stream that must fail before its first message."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await generate(worker, **fields)
    return from_call(caught.value)


async def test_the_form_of_a_stream(worker: WorkerProcess) -> None:
    """No gap in the offsets; the first message has the id and one token, the last the end."""
    messages = await generate(worker, max_tokens=40, request_id="mine")

    offset = 0
    for message in messages:
        assert message.offset == offset
        offset += len(message.token_ids)
    assert [bool(m.request_id) for m in messages] == [True] + [False] * (len(messages) - 1)
    assert (messages[0].request_id, messages[0].model_digest) == ("mine", DIGEST)
    assert len(messages[0].token_ids) == 1
    assert [m.HasField("finish") and m.HasField("usage") for m in messages[:-1]].count(True) == 0
    assert messages[-1].finish.reason == types_pb2.FINISH_REASON_LENGTH
    usage = messages[-1].usage
    assert usage.completion_tokens == offset == 40
    assert usage.total_tokens == usage.prompt_tokens + 40
    spent = (usage.queue_duration, usage.prompt_duration, usage.completion_duration)
    assert all(duration.ToNanoseconds() > 0 for duration in spent)
    assert usage.load_duration.ToNanoseconds() == 0


async def test_the_load_duration_comes_back(worker: WorkerProcess) -> None:
    """What the controller says the load took is told in the usage, and an id is made if absent."""
    request = request_of()
    request.load_duration.FromMilliseconds(1500)
    messages = [m async for m in worker.inference.Generate(request)]

    assert messages[-1].usage.load_duration.ToMilliseconds() == 1500
    assert messages[0].request_id


async def test_a_stop_string_is_not_in_the_text(worker: WorkerProcess) -> None:
    """The text ends before it, and the end names it."""
    whole = text_of(await generate(worker, max_tokens=40))
    stop = whole[10:13]

    messages = await generate(worker, max_tokens=40, stop=["\x00never", stop])

    assert text_of(messages) == whole[: whole.index(stop)]
    assert messages[-1].finish.reason == types_pb2.FINISH_REASON_STOP_STRING
    assert messages[-1].finish.stop_string == stop
    assert messages[-1].usage.completion_tokens == len(ids_of(messages))


async def test_a_stop_token_is_not_in_the_output(worker: WorkerProcess) -> None:
    """The ids end before it, and the end names it."""
    whole = ids_of(await generate(worker))

    messages = await generate(worker, stop_token_ids=[whole[5]])

    assert ids_of(messages) == whole[: whole.index(whole[5])]
    assert messages[-1].finish.reason == types_pb2.FINISH_REASON_STOP_TOKEN
    assert messages[-1].finish.stop_token_id == whole[5]


async def test_eos_ends_unless_ignored(worker: WorkerProcess) -> None:
    """EOS is named and no part of the output; ignored, it is an ordinary token."""
    forced = types_pb2.SamplingOptions(temperature=0, logit_bias={EOS_ID: 100.0})

    (only,) = await generate(worker, sampling=forced, ignore_eos=False)
    ignored = await generate(worker, sampling=forced, ignore_eos=True, max_tokens=3)

    assert (list(only.token_ids), only.text) == ([], "")
    assert only.finish.reason == types_pb2.FINISH_REASON_EOS
    assert only.finish.stop_token_id == EOS_ID
    assert only.usage.completion_tokens == 0
    assert only.request_id
    assert ids_of(ignored) == [EOS_ID] * 3
    assert ignored[-1].finish.reason == types_pb2.FINISH_REASON_LENGTH


async def test_the_context_ends_a_stream(worker: WorkerProcess) -> None:
    """Without a maximum the stream goes on until prompt and completion fill the context."""
    tokens = inference_pb2.TokenIds(ids=[5] * (CONTEXT - 62))
    messages = await generate(worker, tokens=tokens, num_predict=-1)

    assert messages[-1].finish.reason == types_pb2.FINISH_REASON_CONTEXT
    assert messages[-1].usage.total_tokens == CONTEXT


async def test_seeds_reproduce(worker: WorkerProcess) -> None:
    """Equal seeds give equal output; a seed that was drawn is told and gives it again."""
    hot: dict[str, Any] = {"temperature": 1.5, "top_k": 0, "top_p": 1.0}

    async def run(**seed: Any) -> list[inference_pb2.GenerateResponse]:
        sampling = types_pb2.SamplingOptions(**hot, **seed)
        return await generate(worker, sampling=sampling, max_tokens=30)

    first, again, other, drawn = await asyncio.gather(run(seed=5), run(seed=5), run(seed=6), run())
    assert ids_of(first) == ids_of(again) != ids_of(other)
    assert first[-1].usage.seed == 5
    assert ids_of(await run(seed=drawn[-1].usage.seed)) == ids_of(drawn)
    assert drawn[-1].usage.seed != (await run())[-1].usage.seed


async def test_streams_side_by_side_equal_their_lone_runs(worker: WorkerProcess) -> None:
    """Eight streams on four rows, of all lengths, some seeded: each as if it were alone."""
    jobs: list[dict[str, Any]] = [
        {
            "tokens": inference_pb2.TokenIds(
                ids=[3 + (i * 7 + k) % 300 for k in range(1 + 40 * i)]
            ),
            "max_tokens": 10 + 5 * i,
            "sampling": types_pb2.SamplingOptions(temperature=i % 2, seed=i),
        }
        for i in range(8)
    ]
    together = await asyncio.gather(*(generate(worker, **job) for job in jobs))

    for job, messages in zip(jobs, together, strict=True):
        assert ids_of(messages) == ids_of(await generate(worker, **job))


async def test_a_client_that_leaves_frees_its_row(worker: WorkerProcess) -> None:
    """A cancelled stream's row is free at once; its neighbour goes on undisturbed."""
    neighbour = asyncio.create_task(generate(worker, max_tokens=300))
    call = worker.inference.Generate(request_of(num_predict=-1))
    await anext(aiter(call))
    await worker.until(lambda status: status.streams_running == 2 or neighbour.done())

    call.cancel()

    alone = await generate(worker, max_tokens=300)
    assert ids_of(await neighbour) == ids_of(alone)
    status = await worker.until(lambda s: s.streams_running == 0)
    assert status.kv_tokens_used == 0
    swept = await worker.sweep()
    accounts = {account.name: account.bytes for account in swept.memory.accounts}
    assert accounts["kv"] == 0


async def test_a_deadline_frees_the_row(worker: WorkerProcess) -> None:
    """A stream whose deadline passes ends with DEADLINE_EXCEEDED and holds nothing more."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in worker.inference.Generate(request_of(num_predict=-1), timeout=0.05):
            pass

    assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    await worker.until(lambda status: status.streams_running == status.kv_tokens_used == 0)


async def test_a_request_id_is_held_while_in_flight(worker: WorkerProcess) -> None:
    """A second stream of one id is refused until the first has ended."""
    call = worker.inference.Generate(request_of(request_id="twice", num_predict=-1))
    await anext(aiter(call))

    error = await refusal(worker, request_id="twice")
    assert isinstance(error, DuplicateRequest)
    call.cancel()
    await worker.until(lambda status: status.streams_running == 0)
    assert ids_of(await generate(worker, request_id="twice"))


async def test_only_its_own_name_is_served(worker: WorkerProcess) -> None:
    """Name, digest or nothing; another model is unknown, another incarnation refused."""
    expected = ids_of(await generate(worker))
    for name in ("tiny", DIGEST):
        assert ids_of(await generate(worker, model=name)) == expected
    own = await generate(worker, worker_incarnation=worker.incarnation)
    assert ids_of(own) == expected

    assert isinstance(await refusal(worker, model="other"), ModelNotFound)
    error = await refusal(worker, worker_incarnation="other")
    assert isinstance(error, WrongWorker)
    assert error.incarnation == worker.incarnation


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"text": "fox " * (CONTEXT + 100)}, "text"),
        ({"text": f"a fox {BEYOND}"}, "text"),
        ({"tokens": {"ids": [5] * CONTEXT}}, "tokens"),
        ({"tokens": {"ids": [5, VOCAB]}}, "tokens.ids"),
        ({"stop_token_ids": [VOCAB]}, "stop_token_ids"),
        ({"sampling": {"logit_bias": {VOCAB: 1.0}}}, f"sampling.logit_bias[{VOCAB}]"),
        ({"sampling": {"temperature": -1.0}}, "sampling.temperature"),
    ],
)
async def test_bad_input_is_refused_by_name(
    worker: WorkerProcess, fields: dict[str, Any], field: str
) -> None:
    """The field and its limit are named, and the next request is served."""
    error = await refusal(worker, **fields)

    assert isinstance(error, InvalidRequest)
    (violation,) = error.violations
    assert violation.field == field
    assert any(character.isdigit() for character in violation.description)
    assert len(ids_of(await generate(worker))) == 12


async def test_a_prompt_one_below_the_context_is_served(worker: WorkerProcess) -> None:
    """The limit that a refusal names is exact."""
    tokens = inference_pb2.TokenIds(ids=[5] * (CONTEXT - 1))
    assert len(ids_of(await generate(worker, tokens=tokens))) == 1


async def test_the_queue_is_bounded(worker: WorkerProcess) -> None:
    """Streams above rows and waiting places are refused, at one moment with a retry time of their
    own each; all others complete.
    """
    calls = [generate(worker, max_tokens=2) for _ in range(ROWS + WAITING + 20)]
    results = await asyncio.gather(*calls, return_exceptions=True)

    served = [result for result in results if isinstance(result, list)]
    refused = [from_call(e) for e in results if isinstance(e, grpc.aio.AioRpcError)]
    assert len(served) + len(refused) == len(calls)
    assert len(served) >= ROWS + WAITING
    for error in refused:
        assert isinstance(error, QueueFull)
        assert error.limit == WAITING
    waits_s = [error.retry_after_s for error in refused if isinstance(error, QueueFull)]
    assert min(waits_s, default=RETRY_MIN_S) >= RETRY_MIN_S
    # Of two that were refused at moments far enough apart, each may be told the least there is.
    own_s = [wait_s for wait_s in waits_s if wait_s > RETRY_MIN_S + CLOCK_S]
    assert len(set(own_s)) == len(own_s)


async def test_tokenize_and_back(worker: WorkerProcess) -> None:
    """Text survives the round trip; special tokens are added, read and shown as asked."""

    async def tokenize(text: str, **fields: Any) -> list[int]:
        request = inference_pb2.TokenizeRequest(text=text, model="tiny", **fields)
        return list((await worker.inference.Tokenize(request)).token_ids)

    async def detokenize(ids: list[int], **fields: Any) -> str:
        request = inference_pb2.DetokenizeRequest(token_ids=ids, model="tiny", **fields)
        return (await worker.inference.Detokenize(request)).text

    text = "the fox said hello to the café 日本"
    plain = await tokenize(text, add_special_tokens=False)
    assert await tokenize(text) == [1, *plain]
    assert await detokenize([1, *plain]) == text == await detokenize(plain)
    assert await detokenize([1, *plain], skip_special_tokens=False) == "<s>" + text
    assert await tokenize("</s>", add_special_tokens=False, parse_special_tokens=True) == [2]
    assert len(await tokenize("</s>", add_special_tokens=False)) > 1
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await detokenize([VOCAB])
    error = from_call(caught.value)
    assert isinstance(error, InvalidRequest)
    assert error.violations[0].field == "token_ids"


async def test_no_half_characters(worker: WorkerProcess) -> None:
    """Of two tokens that halve a character, the first alone sends no text."""
    request = inference_pb2.TokenizeRequest(text="é", add_special_tokens=False)
    halves = list((await worker.inference.Tokenize(request)).token_ids)
    if len(halves) == 1:  # learned as a whole: take one that was not
        request.text = "ü"
        halves = list((await worker.inference.Tokenize(request)).token_ids)
    assert len(halves) == 2
    options = types_pb2.SamplingOptions(
        temperature=3.0, top_k=0, top_p=1.0, seed=3, logit_bias=dict.fromkeys(halves, 100.0)
    )
    messages = await generate(worker, sampling=options, max_tokens=200)

    ids = ids_of(messages)
    pairs = sum(pair == tuple(halves) for pair in itertools.pairwise(ids))
    assert pairs > 10
    assert text_of(messages).count(request.text) == pairs
    assert messages[-1].usage.completion_tokens == 200


async def test_counters_add_up(worker: WorkerProcess) -> None:
    """A stream more is counted by model, code and reason, and so are its tokens."""

    async def read_counts() -> dict[str, float]:
        got = await worker.status.GetStatus(status_pb2.GetStatusRequest())
        return {
            f"{family.name} {sorted(point.labels.items())}": point.value
            or sum(point.histogram.counts)
            for family in got.status.metrics
            for point in family.points
        }

    def key(name: str, **labels: str) -> str:
        return f"{name} {sorted({'model': 'tiny', **labels}.items())}"

    await generate(worker)
    await refusal(worker, model="other")
    before = await read_counts()
    await generate(worker, text="the fox")
    await refusal(worker, model="other")
    after = await read_counts()

    def growth_of(name: str, **labels: str) -> float:
        return after[key(name, **labels)] - before[key(name, **labels)]

    assert growth_of("mlxd_requests_total", code="OK", finish_reason="length") == 1
    assert growth_of("mlxd_requests_total", code="NOT_FOUND", finish_reason="") == 1
    assert growth_of("mlxd_generation_tokens_total") == 12
    assert growth_of("mlxd_prompt_tokens_total") > 1
    assert growth_of("mlxd_time_to_first_token_seconds") == 1
    assert growth_of("mlxd_inter_token_latency_seconds") == 11
    assert growth_of("mlxd_queue_time_seconds") == 1
