"""Chats with real processes: over a worker's death, and on a terminal."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest

from mlxd.client import (
    AnswerPart,
    Chat,
    ChatMessage,
    Client,
    Delta,
    FormatKind,
    ResponseFormat,
    SamplingOptions,
)
from tests.support.chat_template import write_template
from tests.support.cli import mlxd
from tests.support.served import served
from tests.support.terminal import CTRL_C, CTRL_D, on_terminal

DEMO = Path(__file__).parents[2] / "shared" / "mlxd_shared" / "demo_model"
PATTERN = (
    r'<think>[a-z ]{40}</think>[a-z ]{40}<tool_call>\{"name": "f", "arguments": '
    r'\{"a": "[a-z ]{40}"\}\}</tool_call>'
)
CHAT = Chat((ChatMessage("user", "Once upon a time"),), tools_json=('{"name": "f"}',))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model with a chat template."""
    folder = tmp_path_factory.mktemp("models") / "chatty"
    shutil.copytree(DEMO, folder)
    return write_template(folder)


async def answered(client: Client, *, kill_after: int = 0) -> tuple[AnswerPart, ...]:
    """Return the answer's parts; after so many tokens its worker is killed."""
    texts: dict[int, AnswerPart] = {}
    tokens = 0
    stream = client.generate(
        CHAT,
        model="chatty",
        sampling=SamplingOptions(temperature=0.7, seed=3),
        response_format=ResponseFormat(FormatKind.REGEX, PATTERN),
        max_tokens=300,
        request_id="the-same",
    )
    async with stream:
        async for event in stream:
            if not isinstance(event, Delta):
                assert event.usage.migrations == int(kill_after > 0)
                continue
            assert event.offset == tokens
            if tokens < kill_after <= tokens + len(event.token_ids):
                workers = (await client.status()).workers
                (pid,) = [w.pid for w in workers if w.exit_code is None]
                os.kill(pid, signal.SIGKILL)
            tokens += len(event.token_ids)
            for part in event.parts:
                known = texts.get(part.index, AnswerPart(part.index))
                texts[part.index] = AnswerPart(
                    part.index,
                    known.text + part.text,
                    known.reasoning + part.reasoning,
                    part.tool_call or known.tool_call,
                )
    return tuple(texts.values())


@pytest.mark.asyncio
async def test_the_parts_of_an_answer_survive_its_worker(folder: Path) -> None:
    """In reasoning, in text or within a call: the next worker goes on with the same parts."""
    async with (
        served("--model", f"chatty={folder}") as server,
        Client(server.address) as client,
    ):
        whole = await answered(client)
        cut = [await answered(client, kill_after=count) for count in (8, 28, 60)]

    assert [bool(p.reasoning) for p in whole] == [True, False, False]
    assert whole[1].text
    assert whole[2].tool_call is not None
    assert len(whole[2].tool_call.id) == 9
    for parts in cut:
        assert parts == whole


@pytest.mark.asyncio
async def test_a_chat_on_a_terminal(folder: Path) -> None:
    """Load, answer, stop an answer, and end; from a pipe too, and without a template."""
    async with served("--model", f"chatty={folder}", "--model", f"demo={DEMO}") as server:
        where = ("--address", server.address)
        greedy = ("--temperature", "0", "--stats")
        long = ("--max-tokens", "300", "--logit-bias", "0=-100")  # and never the end of the text
        async with on_terminal("run", "chatty", *greedy, *long, *where) as screen:
            await screen.until(">>> ")
            screen.type("The king\n")
            await screen.until("prompt ")
            await screen.until(">>> ")
            screen.type("More\n")
            await screen.until("\n")
            await screen.until(" ")
            screen.type(CTRL_C)
            await screen.until("stopped")
            await screen.until(">>> ")
            screen.type("/clear\n")
            await screen.until(">>> ")
            screen.type(CTRL_D)
            assert await screen.ended() == 0
        ran = await mlxd("run", "chatty", "--max-tokens", "5", *greedy, *where, piped="Hi\n")
        assert ran.code == 0
        assert "5 tokens" in ran.err
        bare = await mlxd("run", "demo", "Once", "--max-tokens", "5", *greedy, *where, piped="")
        assert bare.code == 0
        assert "no chat template" in bare.err
