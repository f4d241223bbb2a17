"""Chats with real processes: over a worker's death, and on a terminal."""

from __future__ import annotations

import shutil
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import pytest

from mlxd.v1 import inference_pb2, types_pb2
from tests.support.chat_template import DEMO, write_bare_demo, write_template
from tests.support.cli import mlxd
from tests.support.effort import spread_evenly
from tests.support.served import serve
from tests.support.struck import NAME, Struck, struck_controller
from tests.support.terminal import CTRL_C, CTRL_D, on_terminal
from tests.support.tiny_model import write_tiny_model

PATTERN = (
    r'<think>[a-z ]{40}</think>[a-z ]{40}<tool_call>\{"name": "f", "arguments": '
    r'\{"a": "[a-z ]{40}"\}\}</tool_call>'
)
REQUEST = inference_pb2.GenerateRequest(
    model=NAME,
    chat=inference_pb2.ChatPrompt(
        messages=[inference_pb2.ChatMessage(role="user", content="Once upon a time")],
        tools_json=['{"name": "f"}'],
    ),
    sampling=types_pb2.SamplingOptions(temperature=0.7, seed=3),
    response_format=inference_pb2.ResponseFormat(regex=PATTERN),
    max_tokens=300,
    request_id="the-same",
)
CONTEXT = 16384
"""Long enough that a stream without a limit goes on for as long as a test needs it to."""
CUTS = spread_evenly((60, 8, 28), 2)
"""Tokens of an answer after which its worker dies: within the call, the reasoning, the text."""
LETTER_A = 67
"""Its token, in a tiny model's vocabulary."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model with a chat template."""
    folder = tmp_path_factory.mktemp("models") / "chatty"
    shutil.copytree(DEMO, folder)
    return write_template(folder)


@dataclass(slots=True)
class Part:
    """One part of an answer, as far as it came."""

    text: str = ""
    reasoning: str = ""
    call: inference_pb2.ToolCall | None = None


async def answer_parts(struck: Struck, *, kill_after: int = 0) -> dict[int, Part]:
    """Return the answer's parts; after so many tokens its worker is killed."""
    if kill_after:
        struck.strike(kill_after)
    parts: defaultdict[int, Part] = defaultdict(Part)
    tokens = 0
    async for message in struck.inference.Generate(REQUEST):
        assert message.offset == tokens
        tokens += len(message.token_ids)
        for said in message.parts:
            part = parts[said.index]
            part.text += said.text
            part.reasoning += said.reasoning
            if said.HasField("tool_call"):
                part.call = said.tool_call
    assert message.usage.migrations == int(kill_after > 0)
    return dict(parts)


@pytest.mark.asyncio
async def test_the_parts_of_an_answer_survive_its_worker(folder: Path) -> None:
    """In reasoning, in text or within a call: the next worker goes on with the same parts."""
    async with struck_controller(folder) as struck:
        whole = await answer_parts(struck)
        cut = []
        for count in CUTS:
            cut.append(await answer_parts(struck, kill_after=count))
            await struck.unload()

    assert [bool(part.reasoning) for part in whole.values()] == [True, False, False]
    assert whole[1].text
    assert whole[2].call is not None
    assert len(whole[2].call.id) == 9
    for parts in cut:
        assert parts == whole


@pytest.mark.asyncio
async def test_a_chat_on_a_terminal(folder: Path, tmp_path: Path) -> None:
    """Load, answer, forget, answer, and end; from a pipe too, and without a template."""
    plain = write_bare_demo(tmp_path / "bare")
    async with serve("--model", f"chatty={folder}", "--model", f"bare={plain}") as server:
        where = ("--address", server.address)
        short = ("--temperature", "0", "--stats", "--max-tokens", "5")
        async with on_terminal("run", "chatty", *short, *where) as screen:
            await screen.until(">>> ")
            for text in ("The king\n", "More\n"):
                screen.type(text)
                await screen.until("prompt ")
                await screen.until(">>> ")
                screen.type("/clear\n")
                await screen.until(">>> ")
            screen.type(CTRL_D)
            assert await screen.wait_ended() == 0
        ran = await mlxd("run", "chatty", *short, *where, piped="Hi\n")
        assert ran.code == 0
        assert "5 tokens" in ran.err
        bare = await mlxd("run", "bare", "Once", *short, *where, piped="")
        assert bare.code == 0
        assert "no chat template" in bare.err


@pytest.mark.asyncio
async def test_the_built_in_model_can_be_asked() -> None:
    """`mlxd run demo` chats: it says who it is, of its own accord comes to an end, and goes on."""
    async with serve("--model", f"demo={DEMO}") as server:
        where = ("--address", server.address, "--temperature", "0", "--stats")
        ran = await mlxd("run", "demo", "Who are you?", *where, piped="")

        assert ran.code == 0, ran.err
        assert "stories" in ran.out
        assert "no chat template" not in ran.err
        async with on_terminal("run", "demo", *where) as screen:
            await screen.until(">>> ")
            screen.type("Hello!\n")
            await screen.until("prompt ")
            await screen.until(">>> ")
            screen.type(CTRL_D)
            assert await screen.wait_ended() == 0


@pytest.mark.asyncio
async def test_an_answer_is_stopped_on_a_terminal(tmp_path: Path) -> None:
    """Ctrl-C ends the answer and not the chat, in which the next message is answered."""
    long = write_template(write_tiny_model(tmp_path / "long", context_max=CONTEXT))
    endless = ("--temperature", "0", "--logit-bias", f"{LETTER_A}=100")
    async with (
        serve("--model", f"long={long}") as server,
        on_terminal("run", "long", *endless, "--address", server.address) as screen,
    ):
        await screen.until(">>> ")
        for _ in range(2):
            screen.type("Go\n")
            await screen.until("aaaa")
            screen.type(CTRL_C)
            await screen.until("stopped")
            await screen.until(">>> ")
        screen.type(CTRL_D)
        assert await screen.wait_ended() == 0
