"""`mlxd run`: load a model if necessary, and chat with it.

Without a prompt, on a terminal, it is a chat: each message is answered with all before it in mind.
Ctrl-C stops the current answer and the chat continues; at the prompt it clears what is typed, and
with nothing typed it ends the chat. A model without a chat template continues each text instead,
and a note says so; what only a template reads is refused then.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from mlxd import Client
from mlxd_controller.cli import options as o
from mlxd_controller.cli import outcome
from mlxd_controller.cli.chat import pictures, slash
from mlxd_controller.cli.chat.answering import Answerer, answer_once
from mlxd_controller.cli.chat.editor import Editor, Interrupted, open_lines
from mlxd_controller.cli.chat.talk import Talk, read_variable
from mlxd_controller.cli.chat.tools import Tool, ToolsNotUsable, read_tools
from mlxd_controller.cli.commands.models.pull import pull_wanted, wants_pull
from mlxd_controller.cli.commands.prompts.generate import MaxTokens, Stats
from mlxd_controller.cli.completion import named_model
from mlxd_controller.cli.configuration.values import LEFT_OUT
from mlxd_controller.cli.grouping import Session, Work, ask_or_start_server
from mlxd_controller.cli.security import Server
from mlxd_controller.cli.state import state_folder
from mlxd_controller.cli.terminal.progress import ByteBar
from mlxd_shared.config import IMAGES_MAX
from mlxd_shared.domain.chats import ContentPart
from mlxd_shared.domain.errors import MlxdError, ModelNotFound
from mlxd_shared.ops.terminal import escape_line

ModelOrPath = Annotated[
    str, named_model("A name, alias or digest, or a folder (./NAME).", metavar="MODEL")
]
Message = Annotated[
    str | None,
    typer.Argument(
        metavar="[PROMPT]",
        help="A message to answer once; standard input that is not a terminal is appended.",
    ),
]


@dataclass(frozen=True, slots=True)
class Chatting:
    """What belongs to the conversation as a whole."""

    system: Annotated[
        str, typer.Option(help="The system prompt of the conversation.", show_default=False)
    ] = ""
    variable: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="NAME=VALUE",
            help="A variable of the chat template, such as enable_thinking=false; repeatable.",
        ),
    ] = None  # fmt: skip
    tools: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Tools that the model may call, as JSON. You type the results, or allow the"
            " command that the file names.",
        ),
    ] = None
    image: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            help="An image that the first message shows, a PNG, JPEG, WebP or GIF; repeatable.",
        ),
    ] = None
    history: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|none",
            help="Where what you type is kept.  [default: chat_history in ~/.local/state/mlxd]",
            show_default=False,
        ),
    ] = None

    def history_file(self) -> Path | None:
        """Return where to keep what is typed; None: nowhere."""
        if self.history == LEFT_OUT:
            return None
        if self.history:
            return Path(self.history).expanduser().absolute()
        return state_folder(os.environ) / "chat_history"

    def variables(self) -> dict[str, object]:
        """Return the variables of --set; a value that cannot be sent as JSON is a text."""
        variables: dict[str, object] = {}
        for item in self.variable or []:
            name, equals, value = item.partition("=")
            if not equals or not name:
                outcome.usage_error(
                    f"--set: {item!r} is not NAME=VALUE, for example enable_thinking=false"
                )
            variables[name] = read_variable(name, value)
        return variables

    def read_images(self) -> tuple[ContentPart, ...]:
        """Return the images of --image."""
        paths = self.image or []
        if len(paths) > IMAGES_MAX:
            outcome.usage_error(f"--image: at most {IMAGES_MAX}, not {len(paths)}")
        try:
            return tuple(map(pictures.read_image, paths))
        except pictures.ImageNotUsable as error:
            outcome.usage_error(f"--image: {error}")

    def read_tools(self) -> tuple[Tool, ...]:
        """Return the tools of --tools."""
        try:
            return () if self.tools is None else read_tools(self.tools)
        except ToolsNotUsable as error:
            outcome.usage_error(f"--tools: {error}")


@ask_or_start_server
def run(
    model: ModelOrPath,
    prompt: Message = None,
    *,
    chatting: Chatting,
    max_tokens: MaxTokens = None,
    sampling: o.Sampling,
    keep_alive: o.KeepAlive = None,
    stats: Stats = False,
    where: Server,
) -> Work | Session:
    """Load a model if necessary and chat with it, or answer one PROMPT."""
    talk = Talk(
        model=outcome.model_argument(model),
        sampling=sampling.values(),
        max_tokens=max_tokens,
        keep_alive_s=keep_alive,
        stats=stats,
        system=chatting.system,
        variables=chatting.variables(),
        tools=chatting.read_tools(),
        images=chatting.read_images(),
    )
    text = _one_message(prompt)
    if text is None:
        return partial(_chat, where, talk, chatting.history_file())
    return _answer_once(where, talk, text)


def _one_message(argument: str | None) -> str | None:
    """Return the one message to answer; None for a chat."""
    if sys.stdin.isatty():
        return argument
    behind = outcome.read_piped().removesuffix("\n")
    text = "\n\n".join(part for part in (argument, behind) if part)
    if not text:
        outcome.usage_error(
            "no prompt: give it as an argument, pipe it in, or run this on a terminal"
        )
    return text


async def _answer_once(where: Server, talk: Talk, text: str) -> outcome.ExitCode:
    async with where.client() as client:
        try:
            await _load(client, talk)
        except ModelNotFound as error:
            if not wants_pull(error):
                raise
            await pull_wanted(client, error)
            await _load(client, talk)
        return await answer_once(client, talk, text)


def _chat(where: Server, talk: Talk, history: Path | None) -> NoReturn:
    """Answer message after message.

    Raises:
        typer.Exit: always.
    """
    try:
        client = where.client()
    except MlxdError as error:
        raise typer.Exit(outcome.report(error, where.address, where.flags)) from error
    with asyncio.Runner() as runner:
        try:
            runner.run(client.__aenter__())
            _load_or_pull(runner, client, talk)
            editor = Editor(open_lines(runner.run, history))
            answerer = Answerer(runner.run, client, talk, editor)
            converse(
                editor,
                answer=lambda text: _answer_next(partial(answerer.answer, text), where.flags),
                again=lambda: _answer_next(answerer.answer_again, where.flags),
                command=lambda text: _perform(text, talk),
                look=lambda text: _look(text, talk),
            )
            code = outcome.ExitCode.OK
        except (Interrupted, KeyboardInterrupt):
            code = outcome.ExitCode.INTERRUPTED
        except MlxdError as error:
            code = outcome.report(error, where.address, where.flags)
        finally:
            runner.run(client.aclose())
    raise typer.Exit(code)


def _load_or_pull(runner: asyncio.Runner, client: Client, talk: Talk) -> None:
    try:
        runner.run(_load(client, talk))
    except ModelNotFound as error:
        if not wants_pull(error):
            raise
        runner.run(pull_wanted(client, error))
        runner.run(_load(client, talk))
    outcome.say(f"{talk.model} is ready. /? shows help.")


def converse(
    editor: Editor,
    *,
    answer: Callable[[str], None],
    again: Callable[[], None],
    command: Callable[[str], slash.After],
    look: Callable[[str], str] = str,
) -> None:
    """Answer messages until the input ends or a command ends the chat.

    again: answers the last message anew. look: takes the images out of what was typed, and returns
    what there is to say or to do; empty: nothing.

    Raises:
        Interrupted: Ctrl-C at the prompt.
    """
    goes_on = True
    while goes_on:
        try:
            text = editor.message()
            if text is None:
                return
            text = look(text)
            if slash.is_command(text):
                after = command(text)
                goes_on = after is not slash.After.END
                if after is slash.After.ANSWER:
                    again()
            elif text.strip():
                answer(text)
        except KeyboardInterrupt:
            continue  # too late for an answer, too early for the prompt


def _look(text: str, talk: Talk) -> str:
    """Take the images out of a message; one that cannot be shown leaves nothing to answer."""
    if slash.is_known(text):
        return text
    message = pictures.find_images(text)
    if message.paths and not talk.sees:
        outcome.complain(f"{talk.model} does not see images: the path stays text")
        return text
    try:
        pictures.take_images(talk, message.paths)
    except pictures.ImageNotUsable as error:
        outcome.complain(escape_line(str(error)))
        return ""
    for path in message.paths:
        when = "this" if message.text else "your next"
        outcome.say(f"{escape_line(path.name)} goes with {when} message")
    return message.text


def _perform(text: str, talk: Talk) -> slash.After:
    """Do what a command of the chat says; what it has to say goes to stderr."""
    try:
        done = slash.perform(text, talk, state_folder(os.environ) / "chats")
    except slash.Refused as error:
        outcome.complain(str(error))
        return slash.After.PROMPT
    if done.words:
        outcome.say(done.words)
    return done.after


def _answer_next(answer: Callable[[], None], flags: Mapping[str, str]) -> None:
    """Answer one message; an error or an interrupt leaves the chat unchanged."""
    try:
        answer()
    except (KeyboardInterrupt, Interrupted):
        outcome.complain("stopped")
    except MlxdError as error:
        outcome.complain(outcome.describe(error, flags))


async def _load(client: Client, talk: Talk) -> None:
    async with client.load(talk.model) as updates:
        with ByteBar("waiting", quiet=not sys.stderr.isatty()) as bar:
            async for update in updates:
                bar.show_load(update.model)
                talk.model, talk.sees = update.model.name, update.model.has_vision
