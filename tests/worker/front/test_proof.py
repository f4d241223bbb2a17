"""A real worker and its proof: what it spares, what nonsense under it does, where it is not."""

from __future__ import annotations

import math
import secrets
from collections.abc import AsyncIterator
from typing import Any

import grpc
import psutil
import pytest
import pytest_asyncio
from google.protobuf.timestamp_pb2 import Timestamp

from mlxd.v1 import inference_pb2, status_pb2, types_pb2
from mlxd_shared import config
from mlxd_shared.domain.errors import InternalError, InvalidRequest, MlxdError
from mlxd_shared.wire.proof import KEY, Proof
from mlxd_shared.wire.status import from_call
from mlxd_shared.wire.wire_scan import Size
from tests.support.calls import greedy
from tests.support.tiny_model import write_tiny_model
from tests.support.worker_process import WorkerProcess, running_worker

pytestmark = pytest.mark.asyncio(loop_scope="module")

TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
SIZE = Size(0, 64, 64)
LONG_ID = "r" * (config.REQUEST_ID_CHARS_MAX + 1)
"""Refused by its characters; and by its bytes, before it is parsed, where there are many more."""
TYPED = (InternalError, InvalidRequest)
ChatPrompt, ChatMessage = inference_pb2.ChatPrompt, inference_pb2.ChatMessage
USER = ChatMessage(role="user", content="once")
SPELLED = ChatMessage(role="assistant", tool_calls=[inference_pb2.ToolCall(arguments_json="][")])

NONSENSE: tuple[dict[str, Any], ...] = (
    {"text": ""},
    {"tokens": inference_pb2.TokenIds()},
    *({"sampling": types_pb2.SamplingOptions(temperature=t)} for t in (math.nan, -1, math.inf)),
    {"sampling": types_pb2.SamplingOptions(repetition_penalty=0)},
    {"sampling": types_pb2.SamplingOptions(frequency_penalty=math.nan)},
    {"sampling": types_pb2.SamplingOptions(top_p=7, min_p=math.nan, top_k=-(1 << 31))},
    {"sampling": types_pb2.SamplingOptions(logit_bias={1: math.nan})},
    {"sampling": types_pb2.SamplingOptions(logit_bias={1 << 31: 1.0})},
    {"max_tokens": 0},
    {"max_tokens": 4, "min_tokens": 9},
    {"logprobs": True, "top_logprobs": 1 << 31},
    {"stop": [""]},
    {"stop": ["a"] * 3000},
    {"stop_token_ids": [1 << 31]},
    {"speculation": inference_pb2.SpeculationOptions(depth_max=1 << 31)},
    {"response_format": inference_pb2.ResponseFormat(json_schema="{")},
    {"response_format": inference_pb2.ResponseFormat(choice=inference_pb2.ChoiceFormat())},
    {"keep_alive": {"seconds": 1 << 62}, "age": {"seconds": -(1 << 62), "nanos": 5}},
    {"resume_from": 5},
    {"resume_from": 3, "resume_token_ids": [1, 2, 3], "max_tokens": 2},
    {"chat": ChatPrompt()},
    {"chat": ChatPrompt(messages=[USER], tools_json=["nonsense"])},
    {"chat": ChatPrompt(messages=[USER], template_variables_json="[")},
    {"chat": ChatPrompt(messages=[SPELLED])},
    {"chat": ChatPrompt(messages=[USER], now=Timestamp(seconds=1 << 62))},
)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def worker(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[WorkerProcess]:
    """One worker for the whole file."""
    folder = write_tiny_model(tmp_path_factory.mktemp("models") / "tiny", context_max=128)
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    async with running_worker("--log-level", "debug", "--log-format", "json") as process:
        await process.load(folder, rows_max=2)
        yield process


async def outcome(
    worker: WorkerProcess, request: inference_pb2.GenerateRequest, *words: tuple[str, str]
) -> list[int] | MlxdError:
    """Return the ids of a stream, or why there are none."""
    try:
        call = worker.inference.Generate(request, metadata=words)
        return [i for message in [m async for m in call] for i in message.token_ids]
    except grpc.aio.AioRpcError as error:
        return from_call(error)


@pytest.mark.parametrize("many", [1, 200], ids=["its characters", "its bytes"])
async def test_a_worker_checks_again_unless_its_own_controller_has(
    worker: WorkerProcess, many: int
) -> None:
    """Without the proof and with another it is anybody's request; with it, one that was checked."""
    good = await outcome(worker, greedy(max_tokens=4))
    request = greedy(max_tokens=4, request_id=LONG_ID * many)
    _, word = worker.proof.word(SIZE)
    doubted: list[tuple[tuple[str, str], ...]] = [
        (),
        (Proof(secrets.token_hex(32)).word(SIZE),),
        ((KEY, worker.proof.secret),),
        ((KEY, word), (KEY, word)),
    ]
    for words in doubted:
        error = await outcome(worker, request, *words)
        assert isinstance(error, InvalidRequest), words
        assert [each.field for each in error.violations] == ["request_id"]
    assert await outcome(worker, request, (KEY, word)) == good


async def test_what_only_the_worker_knows_is_checked_whoever_asks(worker: WorkerProcess) -> None:
    """Context, vocabulary and the like are no part of what a controller can prove."""
    beyond = inference_pb2.TokenIds(ids=[1 << 20])
    long = inference_pb2.TokenIds(ids=[1] * 200)
    for prompt, field in ((beyond, "tokens.ids"), (long, "tokens")):
        error = await outcome(worker, greedy(tokens=prompt), worker.proof.word(SIZE))
        assert isinstance(error, InvalidRequest)
        assert [each.field for each in error.violations] == [field]


@pytest.mark.parametrize("fields", NONSENSE, ids=",".join)
async def test_nonsense_under_the_proof_harms_only_itself(
    worker: WorkerProcess, fields: dict[str, Any]
) -> None:
    """It ends by itself or with a typed error, and the next stream is as ever."""
    good = await outcome(worker, greedy(max_tokens=4))
    request = inference_pb2.GenerateRequest(**({"max_tokens": 4} | fields))
    if request.WhichOneof("prompt") is None:
        request.text = "once upon"

    result = await outcome(worker, request, worker.proof.word(SIZE))
    assert isinstance(result, (list, *TYPED)), result
    assert await outcome(worker, greedy(max_tokens=4)) == good
    assert worker.process.returncode is None


async def test_the_secret_is_on_the_ready_line_alone(worker: WorkerProcess) -> None:
    """It is in no argument, environment, log line or figure, whatever has come of requests."""
    secret = worker.proof.secret
    bad = greedy(stop=[""])
    assert isinstance(await outcome(worker, bad, worker.proof.word(SIZE)), InternalError)
    assert isinstance(await outcome(worker, bad, Proof.make().word(SIZE)), InvalidRequest)
    process = psutil.Process(worker.pid)
    status = await worker.status.GetStatus(status_pb2.GetStatusRequest())
    places = (worker.log, *process.cmdline(), *process.environ().values(), str(status))
    assert "internal error" in worker.log
    assert [place for place in places if secret in place] == []
