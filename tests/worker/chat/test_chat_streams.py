"""Chats through a real worker process: parts, resumes, what a turn costs, and what is refused."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from mlxd.v1 import inference_pb2 as pb
from mlxd.v1 import types_pb2
from mlxd_shared.domain.errors import InvalidModel, InvalidRequest, NoChatTemplate
from tests.support.chat_template import ANSWER, PATTERN, write_template
from tests.support.tiny_model import write_tiny_model
from tests.support.worker_process import WorkerProcess, running_worker
from tests.worker.front.test_worker_streams import generate, ids_of, refusal, text_of

pytestmark = pytest.mark.asyncio(loop_scope="module")

DEMO = Path(__file__).parents[3] / "shared" / "mlxd_shared" / "demo_model"
TOOL = '{"name": "f", "parameters": {"type": "object", "properties": {}}}'
FORMAT = pb.ResponseFormat(regex=PATTERN)


@pytest_asyncio.fixture(loop_scope="module", scope="module", params=["0", "100"])
async def worker(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[WorkerProcess]:
    """A worker of a tiny model with a template; one that replays by decoding, one that does not."""
    folder = write_template(write_tiny_model(tmp_path_factory.mktemp("tiny")))
    async with running_worker("--replay-steps", request.param) as process:
        await process.load(folder)
        yield process


def chat(*contents: str, **fields: Any) -> pb.ChatPrompt:
    """A conversation of a user's messages, with a tool on offer."""
    messages = [pb.ChatMessage(role="user", content=content) for content in contents]
    return pb.ChatPrompt(messages=messages, **{"tools_json": [TOOL], **fields})


def parts_of(messages: list[pb.GenerateResponse]) -> list[tuple[int, str, str]]:
    """The parts of an answer: index, kind, and the pieces of each together."""
    parts: dict[int, tuple[str, str]] = {}
    for part in (part for message in messages for part in message.parts):
        kind = str(part.WhichOneof("kind"))
        call = part.tool_call
        said = part.text or part.reasoning or f"{call.id} {call.name}{call.arguments_json}"
        known = parts.get(part.index, (kind, ""))
        assert known[0] == kind
        parts[part.index] = (kind, known[1] + said)
    return [(index, *parts[index]) for index in parts]


async def answer(worker: WorkerProcess, **fields: Any) -> list[pb.GenerateResponse]:
    """The messages of the answer that the format leaves no choice in."""
    fields = {"chat": chat("hi"), "response_format": FORMAT, "request_id": "r", **fields}
    return await generate(worker, ignore_eos=False, max_tokens=200, **fields)


async def test_an_answer_comes_in_parts(worker: WorkerProcess) -> None:
    """Reasoning, text and a call, each of its kind; `text` is the text alone."""
    messages = await answer(worker)
    (first, second, third) = parts_of(messages)

    assert (first, second) == ((0, "reasoning", "hm"), (1, "text", "ok"))
    assert third[:2] == (2, "tool_call")
    assert third[2].split(" ", 1)[1] == 'f{"a": 1}'
    assert text_of(messages) == "ok"


async def test_parts_can_be_left_out(worker: WorkerProcess) -> None:
    """Whoever wants the text as the model writes it gets it, and no parts."""
    messages = await answer(worker, chat=chat("hi", parse_output=False))

    assert text_of(messages) == ANSWER
    assert not parts_of(messages)


async def test_a_resumed_chat_goes_on_with_the_same_parts(worker: WorkerProcess) -> None:
    """Wherever it broke off, what came before and what comes then are the parts of the whole."""
    whole = await answer(worker)
    ids, expected = ids_of(whole), parts_of(whole)
    seed = types_pb2.SamplingOptions(temperature=0, seed=whole[0].seed)
    for cut in range(1, len(ids), 5):
        before = [m for m in whole if m.offset + len(m.token_ids) <= cut]
        ids_before = ids[: sum(len(m.token_ids) for m in before)]
        if not ids_before:
            continue
        rest = await answer(
            worker, sampling=seed, resume_from=len(ids_before), resume_token_ids=ids_before
        )
        assert parts_of([*before, *rest]) == expected


async def test_a_stop_string_is_found_before_parts_are_told(worker: WorkerProcess) -> None:
    """The answer ends before it, and what it had begun is text."""
    messages = await answer(worker, stop=['"arguments"'])

    assert messages[-1].finish.stop_string == '"arguments"'
    assert parts_of(messages)[1:] == [(1, "text", 'ok <tool_call>{"name": "f", ')]


async def test_a_conversation_that_cannot_be_rendered_names_its_field(
    worker: WorkerProcess,
) -> None:
    """What the template refuses, and a prompt that is too long, are the request's faults."""
    shown = chat("hi", template_variables_json='{"show": "messages"}')
    error = await refusal(worker, chat=shown)
    assert isinstance(error, InvalidRequest)
    assert error.violations[0].field == "chat.messages"
    assert '"content": "hi"' in error.violations[0].description
    for text in ("word " * 2000, "x" * 1_000_000):
        error = await refusal(worker, chat=chat(text))
        assert isinstance(error, InvalidRequest)
        assert error.violations[0].field in ("chat", "chat.messages")
    assert len(ids_of(await generate(worker))) == 12


async def test_a_model_without_a_template_says_so(tmp_path: Path) -> None:
    """No template is one thing, a damaged one another; text is served all the same."""
    async with running_worker() as process:
        await process.load(write_tiny_model(tmp_path / "plain"))
        error = await refusal(process, chat=chat("hi"))
        assert isinstance(error, NoChatTemplate)
        assert len(ids_of(await generate(process))) == 12
    async with running_worker() as process:
        await process.load(write_template(write_tiny_model(tmp_path / "bad"), "{% if %}"))
        error = await refusal(process, chat=chat("hi"))
        assert isinstance(error, InvalidModel)
        assert error.file == "chat_template.jinja"
        assert len(ids_of(await generate(process))) == 12


async def test_the_next_turn_of_a_chat_costs_its_new_tokens(tmp_path: Path) -> None:
    """The prompt of the second turn begins with the first one and its answer, which are kept."""
    folder = tmp_path / "demo"
    shutil.copytree(DEMO, folder)
    write_template(folder)
    async with running_worker() as process:
        await process.load(folder)
        conversation = chat("Tell me of the old king who lived by the sea. " * 8, tools_json=[])
        first = await generate(process, chat=conversation, max_tokens=40)
        text = text_of(first)
        conversation.messages.add(role="assistant", content=text)
        conversation.messages.add(role="user", content="And then?")
        second = (await generate(process, chat=conversation, max_tokens=8))[-1].usage

    before = first[-1].usage
    assert before.cached_tokens == 0
    assert second.prompt_tokens > before.prompt_tokens + 40
    assert second.prompt_tokens - second.cached_tokens <= 24
