"""`mlxd run` on a real terminal: every key and command, at both sizes, and what stays apart."""

from __future__ import annotations

import json
import signal
import stat
import sys
from pathlib import Path

import pytest

from mlxd.v1 import inference_pb2 as pb
from mlxd.v1 import model_pb2 as pb_model
from mlxd_shared.domain import errors
from tests.controller.cli.commands.prompts.test_run import READY, answer, conversations
from tests.fakes.mlxd_server import Answers, serving
from tests.support.cli import mlxd
from tests.support.terminal import CTRL_C, CTRL_D, SMALL, USUAL, XTERM, Terminal, on_terminal

PASTE_BEGIN, PASTE_END, UP, NEWLINE = "\x1b[200~", "\x1b[201~", "\x1b[A", "\x1b\r"
STORY = " ".join(f"word{number}" for number in range(40))
PROMPT = ">>>"
PROMPT_BEGINS = "\x1b[?2004h"
"""Pasted lines are marked from then on."""


def call(name: str, arguments: str = "{}") -> list[pb.GenerateResponse | errors.MlxdError]:
    """An answer that is a call."""
    messages = answer("x")
    first = messages[0]
    assert isinstance(first, pb.GenerateResponse)
    first.text = ""
    del first.parts[:]
    tool_call = pb.ToolCall(name=name, arguments_json=arguments, id="c1")
    first.parts.append(pb.OutputPart(index=0, tool_call=tool_call))
    return messages


async def at_prompt(screen: Terminal) -> str:
    """What is to be seen once the last line is a prompt without anything behind it."""

    def is_at_prompt(shown: str) -> bool:
        return shown.rstrip().endswith(f"\n{PROMPT}") or shown.rstrip() == PROMPT

    return await screen.until_shown(is_at_prompt)


async def say(screen: Terminal, text: str) -> str:
    """Type a line, and wait for the next prompt; return what is to be seen."""
    seen = len(screen.screen)
    screen.type(text + "\r")
    await screen.until_shown(lambda _: PROMPT_BEGINS in screen.screen[seen:])
    return await at_prompt(screen)


def check_words(shown: str, words: list[str]) -> None:
    """Each of these words stands whole on a line."""
    seen = shown.split()
    assert [word for word in words if word not in seen] == []


@pytest.mark.asyncio
@pytest.mark.parametrize("size", [USUAL, SMALL])
async def test_every_command_at_both_sizes(size: tuple[int, int], tmp_path: Path) -> None:
    """None breaks a word, blocks or raises; none reaches the model."""
    answers = Answers(load=[READY], generate=answer(STORY))
    state = {"XDG_STATE_HOME": str(tmp_path)}
    async with serving(answers) as fake:
        where = ("--address", fake.address)
        chat = on_terminal("run", "demo", *where, term=XTERM, size=size, environment=state)
        async with chat as screen:
            await at_prompt(screen)
            check_words(await say(screen, "Hi"), STORY.split())
            assert "a blank before it makes" in " ".join((await say(screen, "/foo")).split())
            check_words(await say(screen, "/help"), ["Ctrl-C", "/regenerate", "/bye", "chat."])
            await say(screen, "/system Be kind.")
            await say(screen, "/set temperature=0.5")
            assert "temperature=0.5" in await say(screen, "/show")
            await say(screen, "/regenerate")
            await say(screen, "/save it")
            await say(screen, "/clear")
            assert "2 messages of it" in await say(screen, "/load it")
            screen.type("/bye\r")
            assert await screen.wait_ended() == 0
            assert "Traceback" not in screen.screen

    sent = conversations(fake)
    assert sent == [[("user", "Hi")], [("system", "Be kind."), ("user", "Hi")]]
    assert (tmp_path / "mlxd" / "chats" / "it.json").is_file()


@pytest.mark.asyncio
async def test_pasted_lines_are_one_message() -> None:
    """And so are those that are broken by hand; the message is shown as it is sent."""
    answers = Answers(load=[READY], generate=answer("Yes"))
    async with serving(answers) as fake:
        where = ("--address", fake.address)
        async with on_terminal("run", "demo", *where, term=XTERM) as screen:
            await at_prompt(screen)
            screen.type(f"{PASTE_BEGIN}def f():\r    return 1\r{PASTE_END}")
            await screen.until_shown("    return 1")
            screen.type("\r")
            await screen.until_shown("Yes")
            await at_prompt(screen)
            screen.type(f"one{NEWLINE}two\r")
            await screen.until_shown(lambda _: len(conversations(fake)) == 2)
            await at_prompt(screen)
            screen.type(CTRL_D)
            assert await screen.wait_ended() == 0

    assert conversations(fake)[0] == [("user", "def f():\n    return 1\n")]
    assert conversations(fake)[1][-1] == ("user", "one\ntwo")


@pytest.mark.asyncio
async def test_a_dropped_path_shows_its_image(tmp_path: Path) -> None:
    """It begins with a slash and is no command; the words behind it are the message."""
    image = tmp_path / "cat.png"
    image.write_bytes(b"pixels")
    ready = pb_model.LoadModelResponse()
    ready.CopyFrom(READY)
    ready.model.has_vision = True
    async with (
        serving(Answers(load=[ready], generate=answer("Yes"))) as fake,
        on_terminal("run", "demo", "--address", fake.address, term=XTERM) as screen,
    ):
        await at_prompt(screen)
        screen.type(f"{PASTE_BEGIN}{image} {PASTE_END}what?\r")
        await screen.until_shown("Yes")
        shown = await at_prompt(screen)
        screen.type(CTRL_D)
        assert await screen.wait_ended() == 0
    assert "cat.png goes with this message" in " ".join(shown.split())
    (request,) = [r for r in fake.requests if isinstance(r, pb.GenerateRequest)]
    (message,) = request.chat.messages
    assert [(part.image, part.text) for part in message.parts] == [(b"pixels", ""), (b"", "what?")]


@pytest.mark.asyncio
async def test_ctrl_c_clears_what_is_typed_and_then_ends() -> None:
    """A half line is gone and nothing was sent; with nothing typed the chat ends."""
    async with (
        serving(Answers(load=[READY], generate=answer("Yes"))) as fake,
        on_terminal("run", "demo", "--address", fake.address, term=XTERM) as screen,
    ):
        await at_prompt(screen)
        screen.type("half a line")
        await screen.until_shown("half a line")
        screen.type(CTRL_C)
        await at_prompt(screen)
        assert "half" not in screen.shown
        screen.type(CTRL_C)
        assert await screen.wait_ended() == 130
        assert "Traceback" not in screen.screen
    assert conversations(fake) == []


@pytest.mark.asyncio
async def test_an_answer_is_stopped_and_the_chat_goes_on() -> None:
    """Also where lines are edited: Ctrl-C is the answer's then."""
    answers = Answers(load=[READY], generate=answer("Once ", "upon ")[:-1], hold=True)
    async with (
        serving(answers) as fake,
        on_terminal("run", "demo", "--address", fake.address, term=XTERM) as screen,
    ):
        await at_prompt(screen)
        screen.type("Tell\r")
        await screen.until_shown("Once")
        await fake.held.wait()
        screen.type(CTRL_C)
        assert "stopped" in await at_prompt(screen)
        screen.type(CTRL_D)
        assert await screen.wait_ended() == 0


@pytest.mark.asyncio
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
async def test_a_signal_at_the_prompt_gives_the_terminal_back(number: signal.Signals) -> None:
    """Keys are echoed and lines are edited as before, and the chat ends as by that signal."""
    async with serving(Answers(load=[READY])) as fake:
        chat = on_terminal("run", "demo", "--address", fake.address, term=XTERM)
        async with chat as screen:
            before = screen.modes
            await at_prompt(screen)
            assert screen.modes != before
            screen.process.send_signal(number)
            assert await screen.wait_ended() == -number
            assert screen.modes == before
            assert "Traceback" not in screen.screen


@pytest.mark.asyncio
async def test_what_was_typed_comes_back_in_the_next_chat(tmp_path: Path) -> None:
    """By the arrow; the file is its user's alone, and `--history none` has none."""
    history = tmp_path / "typed"
    async with serving(Answers(load=[READY], generate=answer("Yes"))) as fake:
        where = ("--address", fake.address)
        for options in (("--history", str(history)), ("--history", "none")):
            async with on_terminal("run", "demo", *where, *options, term=XTERM) as screen:
                await at_prompt(screen)
                await say(screen, "kept" if options[1] == str(history) else "not kept")
                screen.type(CTRL_D)
                assert await screen.wait_ended() == 0
        kept = ("--history", str(history))
        async with on_terminal("run", "demo", *where, *kept, term=XTERM) as screen:
            await at_prompt(screen)
            screen.type(UP)
            await screen.until_shown(f"{PROMPT} kept")
    assert history.read_text() == '"kept"\n'
    assert stat.S_IMODE(history.stat().st_mode) == 0o600


@pytest.mark.asyncio
async def test_answers_alone_are_on_stdout(tmp_path: Path) -> None:
    """Where that is a file, prompt, echo and notes are on the terminal."""
    out = tmp_path / "out"
    with out.open("wb") as file:
        async with serving(Answers(load=[READY], generate=answer(STORY))) as fake:
            chat = on_terminal(
                "run", "demo", "--stats", "--address", fake.address, term=XTERM,
                stdout=file.fileno(),
            )  # fmt: skip
            async with chat as screen:
                await at_prompt(screen)
                screen.type("Hi\r")
                await screen.until_shown("ended by length")
                await at_prompt(screen)
                screen.type("/show\r")
                await screen.until_shown("messages   2")
                await at_prompt(screen)
                screen.type(CTRL_D)
                assert await screen.wait_ended() == 0
    assert out.read_text() == STORY + "\n"


@pytest.mark.asyncio
async def test_calls_are_answered_by_hand_or_by_a_command_that_is_allowed(tmp_path: Path) -> None:
    """Each call is shown; nothing runs without a yes; the model is told the results.

    What is typed as a result is not for the history.
    """
    tools, history = tmp_path / "tools.json", tmp_path / "typed"
    ran = tmp_path / "ran"
    program = f"open({str(ran)!r}, 'a').write('x'); print('sunny in ' + input())"
    tools.write_text(json.dumps([
        {"name": "weather", "command": [sys.executable, "-c", program]}, {"name": "time"},
    ]))  # fmt: skip
    answers = Answers(
        load=[READY],
        generate=call("time"),
        generate_again=[
            answer("Noon."), call("weather", '{"a": 1}'), answer("Wet."),
            call("weather", '{"a": 2}'), answer("Sunny."), call("time"),
        ],
    )  # fmt: skip
    async with serving(answers) as fake:
        options = ("--tools", str(tools), "--history", str(history), "--address", fake.address)
        async with on_terminal("run", "demo", *options, term=XTERM) as screen:
            await at_prompt(screen)
            screen.type("Time?\r")
            await screen.until_shown("result of time:")
            assert "calls time {}" in screen.shown
            screen.type("12:00\r")
            await screen.until_shown("Noon.")
            await at_prompt(screen)
            screen.type("Weather?\r")
            await screen.until_shown("n: type the result:")
            screen.type("n\r")
            await screen.until_shown("result of weather:")
            assert not ran.exists()
            screen.type("rain\r")
            await screen.until_shown("Wet.")
            await at_prompt(screen)
            screen.type("And now?\r")
            await screen.until_shown(lambda shown: shown.count("n: type the result:") == 2)
            screen.type("y\r")
            await screen.until_shown("Sunny.")
            await at_prompt(screen)
            screen.type("Again?\r")
            await screen.until_shown(lambda shown: shown.rstrip().endswith("result of time:"))
            screen.type(CTRL_C)
            assert "stopped" in await at_prompt(screen)
            screen.type(CTRL_D)
            assert await screen.wait_ended() == 0
    assert ran.read_text() == "x"
    typed = [json.loads(line) for line in history.read_text().splitlines()]
    assert typed == ["Time?", "Weather?", "And now?", "Again?"]
    last = conversations(fake)[-1]
    assert [content for role, content in last if role == "tool"] == [
        "12:00", "rain", 'sunny in {"a": 2}',
    ]  # fmt: skip
    assert last[-1] == ("user", "Again?")


@pytest.mark.asyncio
async def test_calls_of_one_message_are_shown(tmp_path: Path) -> None:
    """Nobody is asked for results on a pipe; a file of tools that is none is refused."""
    tools = tmp_path / "tools.json"
    tools.write_text('[{"name": "time"}]')
    answers = Answers(load=[READY], generate=call("time", '{"in": "Rome"}'))
    async with serving(answers) as fake:
        where = ("--address", fake.address)
        ran = await mlxd("run", "demo", "Time?", "--tools", str(tools), *where, piped="")
        request = fake.requests[-1]
        tools.write_text("[]")
        bad = await mlxd("run", "demo", "Time?", "--tools", str(tools), *where, piped="")
    assert (ran.code, ran.out) == (0, 'calls time {"in": "Rome"}\n')
    assert isinstance(request, pb.GenerateRequest)
    assert list(request.chat.tools_json) == ['{"name": "time"}']
    assert (bad.code, bad.out) == (2, "")
    assert "--tools:" in bad.err
