"""`mlxd run` on a terminal and on pipes, against a scripted server."""

from __future__ import annotations

import json

import pytest

from mlxd.v1 import inference_pb2 as pb
from mlxd.v1 import model_pb2, types_pb2
from mlxd_controller.cli.chat.editor import Editor, Interrupted
from mlxd_controller.cli.chat.slash import After
from mlxd_controller.cli.commands.prompts.run import converse
from mlxd_shared.domain import errors
from mlxd_shared.domain.errors import MlxdError
from tests.fakes import replies
from tests.fakes.mlxd_server import Answers, FakeServer, serving
from tests.support.cli import mlxd
from tests.support.terminal import CTRL_C, CTRL_D, on_terminal

READY = model_pb2.LoadModelResponse(
    model=types_pb2.Model(name="demo", state=types_pb2.MODEL_STATE_READY)
)


def answer(*texts: str, reasoning: str = "") -> list[pb.GenerateResponse | MlxdError]:
    """The messages of an answer that comes in these pieces."""
    last = replies.story()[-1]
    last.offset = len(texts)
    last.ClearField("token_ids")
    last.ClearField("logprobs")
    last.text = ""
    index = int(bool(reasoning))
    messages: list[pb.GenerateResponse | MlxdError] = [
        pb.GenerateResponse(
            offset=offset,
            text=text,
            token_ids=[offset],
            parts=[pb.OutputPart(index=index, text=text)],
        )
        for offset, text in enumerate(texts)
    ]
    first = messages[0]
    assert isinstance(first, pb.GenerateResponse)
    first.request_id, first.model_digest, first.seed = "r", "d", 1
    if reasoning:
        first.parts.insert(0, pb.OutputPart(index=0, reasoning=reasoning))
    return [*messages, last]


def conversations(fake: FakeServer) -> list[list[tuple[str, str]]]:
    """The conversations that came: role and content of each message."""
    return [
        [(m.role, m.content) for m in request.chat.messages]
        for request in fake.requests
        if isinstance(request, pb.GenerateRequest)
    ]


@pytest.mark.asyncio
async def test_a_chat_keeps_what_was_said() -> None:
    """The model is loaded first; each message goes with all before it; Ctrl-D ends the chat."""
    answers = Answers(
        load=[READY], generate=answer("Hel", "lo"), generate_again=[answer("Fine\x1b[2J")]
    )
    async with (
        serving(answers) as fake,
        on_terminal("run", "demo", "--system", "Be kind.", "--address", fake.address) as screen,
    ):
        await screen.until(">>> ")
        screen.type("Hi\n")
        assert "Hello\n" in await screen.until(">>> ")
        screen.type('"""How are\nyou?"""\n')
        assert "Fine[2J\n" in await screen.until(">>> ")
        screen.type("/clear\nand \\\n")
        await screen.until("... ")
        screen.type("now?\n")
        await screen.until(">>> ")
        screen.type(CTRL_D)
        assert await screen.wait_ended() == 0

    assert isinstance(fake.requests[0], model_pb2.LoadModelRequest)
    system = ("system", "Be kind.")
    assert conversations(fake) == [
        [system, ("user", "Hi")],
        [system, ("user", "Hi"), ("assistant", "Hello"), ("user", "How are\nyou?")],
        [system, ("user", "and \nnow?")],
    ]


@pytest.mark.asyncio
async def test_ctrl_c_stops_the_answer_alone() -> None:
    """The stream is cancelled, what had come is kept, the chat goes on; at the prompt it ends."""
    answers = Answers(
        load=[READY],
        generate=answer("Once ", "upon")[:-1],
        generate_again=[answer("Sure")],
        hold=True,
    )
    async with (
        serving(answers) as fake,
        on_terminal("run", "demo", "--address", fake.address) as screen,
    ):
        await screen.until(">>> ")
        screen.type("Tell\n")
        await screen.until("upon")
        screen.type(CTRL_C)
        assert "stopped" in await screen.until(">>> ")
        await fake.left.wait()
        screen.type("Go on\n")
        await screen.until("Sure")
        screen.type(CTRL_C)
        await screen.until(">>> ")
        assert await screen.ended_by(CTRL_C) == 130

    assert conversations(fake)[1] == [
        ("user", "Tell"),
        ("assistant", "Once upon"),
        ("user", "Go on"),
    ]


class Typed:
    """Somebody who types these lines, then presses Ctrl-C at the prompt."""

    def __init__(self, *lines: str) -> None:
        self._lines = iter(lines)

    def read(self, prompt: str, *, keeps: bool = True) -> str:
        """Return the next line."""
        for line in self._lines:
            return line
        raise Interrupted


def test_ctrl_c_between_an_answer_and_the_prompt_ends_nothing() -> None:
    """One that comes as the answer ends is passed over, and only one at the prompt leaves."""
    answered: list[str] = []

    def answer(text: str) -> None:
        answered.append(text)
        raise KeyboardInterrupt

    with pytest.raises(Interrupted):
        converse(
            Editor(Typed("one", "two")),
            answer=answer,
            again=answered.clear,
            command=lambda _: After.END,
        )

    assert answered == ["one", "two"]


@pytest.mark.asyncio
async def test_a_refused_message_leaves_the_chat_as_it_was() -> None:
    """The reason is told, and the next message goes without it."""
    refusal = errors.InvalidRequest.of("chat.messages", "roles must alternate")
    answers = Answers(load=[READY], generate=[refusal], generate_again=[answer("Yes")])
    async with (
        serving(answers) as fake,
        on_terminal("run", "demo", "--address", fake.address) as screen,
    ):
        await screen.until(">>> ")
        screen.type("Hi\n")
        assert "roles must alternate" in await screen.until(">>> ")
        screen.type("Hello\n")
        await screen.until("Yes")
        await screen.until(">>> ")
        screen.type("/bye\n")
        assert await screen.wait_ended() == 0

    assert conversations(fake)[1] == [("user", "Hello")]


@pytest.mark.asyncio
async def test_a_prompt_comes_from_arguments_and_pipes() -> None:
    """One answer on stdout, without its reasoning; what is piped comes behind the argument."""
    answers = Answers(load=[READY], generate=answer("Short", reasoning="Well."))
    async with serving(answers) as fake:
        ran = await mlxd(
            "run", "demo", "Sum up:", "--set", "enable_thinking=false", "--set", "tone=dry",
            "--set", "odd=NaN", "--set", f"deep={'[' * 9999}",
            "--max-tokens", "9", "--temperature", "0", "--stats", "--address", fake.address,
            piped="a long\ntext\n",
        )  # fmt: skip
        request = fake.requests[-1]

    assert (ran.code, ran.out) == (0, "Short\n")
    assert "ended by length" in ran.err
    assert isinstance(request, pb.GenerateRequest)
    assert [m.content for m in request.chat.messages] == ["Sum up:\n\na long\ntext"]
    assert json.loads(request.chat.template_variables_json) == {
        "enable_thinking": False, "tone": "dry", "odd": "NaN", "deep": "[" * 9999,
    }  # fmt: skip
    assert (request.max_tokens, request.sampling.temperature) == (9, 0)


@pytest.mark.asyncio
async def test_a_model_without_a_template_goes_on_with_the_text() -> None:
    """It is said once, and the text is sent as it is."""
    answers = Answers(
        load=[READY],
        generate=[errors.NoChatTemplate("demo")],
        generate_again=[replies.story()],
    )
    async with serving(answers) as fake:
        ran = await mlxd("run", "demo", "Once", "--address", fake.address, piped="")
        request = fake.requests[-1]

    assert (ran.code, ran.out) == (0, "Once upon ä\n")
    assert "no chat template" in ran.err
    assert isinstance(request, pb.GenerateRequest)
    assert request.text == "Once"


@pytest.mark.asyncio
async def test_what_only_a_template_reads_is_refused_without_one() -> None:
    """Nothing that was asked for is left out without a word, in a chat neither."""
    options = ("--system", "Be kind.", "--set", "tone=dry")
    answers = Answers(load=[READY], generate=[errors.NoChatTemplate("demo")])
    async with serving(answers) as fake:
        where = ("--address", fake.address)
        once = await mlxd("run", "demo", "Once", *options, *where, piped="")
        async with on_terminal("run", "demo", *options[:2], *where) as screen:
            await screen.until(">>> ")
            screen.type("Once\n")
            assert await screen.wait_ended() == 2

    problem = "demo has no chat template, which alone would read that"
    assert (once.code, once.err) == (2, f"mlxd: --system and --set: {problem}\n")
    assert f"--system: {problem}" in screen.screen
    assert sum(isinstance(request, pb.GenerateRequest) for request in fake.requests) == 2


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("run", "demo"), 2, "no prompt"),
        (("run", "demo", "hi", "--set", "x"), 2, "NAME=VALUE"),
        (("run", "nobody", "hi"), 3, "no model"),
    ],
)
async def test_what_cannot_be_run_says_why(
    arguments: tuple[str, ...], code: int, words: str
) -> None:
    """Exit codes are those of every command."""
    async with serving(Answers(load=[errors.ModelNotFound("nobody")])) as fake:
        ran = await mlxd(*arguments, "--address", fake.address, piped="")

    assert ran.code == code
    assert words in ran.err


@pytest.mark.asyncio
async def test_a_chat_with_no_address_is_bad_usage() -> None:
    """In one line, as of every other command."""
    async with on_terminal("--address", "bogus", "run", "demo") as terminal:
        assert await terminal.wait_ended() == 2
        assert "mlxd: address: 'bogus' is not unix:PATH" in terminal.screen
        assert "Traceback" not in terminal.screen
