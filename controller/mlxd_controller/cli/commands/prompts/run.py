"""`mlxd run`: load a model if necessary, and chat with it.

Without a prompt, on a terminal, it is a chat: each message is answered with all before it in mind.
Ctrl-C stops the current answer and the chat continues; at the prompt it ends the chat. A model
without a chat template continues each text instead, and a note says so; what only a template reads
is refused then.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, NoReturn

import typer

from mlxd import Client
from mlxd.answers import Delta, Finished
from mlxd_controller.cli import options as o
from mlxd_controller.cli.commands.prompts.generate import MaxTokens, Stats, conclude
from mlxd_controller.cli.completion import named_model
from mlxd_controller.cli.grouping import ask_server
from mlxd_controller.cli.outcome import (
    ExitCode,
    complain,
    describe,
    model_argument,
    read_piped,
    report,
    usage_error,
)
from mlxd_controller.cli.security import Server
from mlxd_controller.cli.terminal.line_editor import AnswerWriter, Interrupted, LineEditor
from mlxd_controller.cli.terminal.progress import ByteBar
from mlxd_shared.domain.chats import AnswerPart, Chat, ChatMessage, answer_of, json_object
from mlxd_shared.domain.errors import MlxdError, NoChatTemplate
from mlxd_shared.domain.requests import SamplingOptions

HELP = (
    '/clear forgets the conversation, /bye or Ctrl-D ends it. """ begins and ends a message of'
    " several lines; a final \\ continues a line. Ctrl-C stops an answer."
)

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
System = Annotated[
    str, typer.Option(help="The system prompt of the conversation.", show_default=False)
]
Variable = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="NAME=VALUE",
        help="A variable of the chat template, such as enable_thinking=false; repeatable.",
    ),
]  # fmt: skip


@dataclass(slots=True)
class Talk:
    """A conversation so far, and the options of its answers."""

    model: str
    sampling: SamplingOptions
    max_tokens: int | None
    keep_alive_s: float | None
    variables_json: str
    stats: bool
    system: str = ""
    messages: list[ChatMessage] = field(default_factory=list)
    chats: bool = True
    """Whether the model has a template for chats; found out by the first message."""

    def prompt(self, text: str) -> Chat | str:
        """Return the prompt for a message."""
        if not self.chats:
            return text
        first = [ChatMessage("system", self.system)] if self.system else []
        messages = (*first, *self.messages, ChatMessage("user", text))
        return Chat(messages, variables_json=self.variables_json)


@ask_server
def run(
    model: ModelOrPath,
    prompt: Message = None,
    *,
    system: System = "",
    max_tokens: MaxTokens = None,
    variable: Variable = None,
    sampling: o.Sampling,
    keep_alive: o.KeepAlive = None,
    stats: Stats = False,
    where: Server,
) -> Coroutine[Any, Any, ExitCode]:
    """Load a model if necessary and chat with it, or answer one PROMPT."""
    talk = Talk(
        model=model_argument(model),
        sampling=sampling.values(),
        max_tokens=max_tokens,
        keep_alive_s=keep_alive,
        variables_json=_variables(variable or []),
        stats=stats,
        system=system,
    )
    text = _one_message(prompt)
    if text is None:
        _chat(where, talk)
    return _answer_once(where, talk, text)


def _one_message(argument: str | None) -> str | None:
    """Return the one message to answer; None for a chat."""
    if sys.stdin.isatty():
        return argument
    behind = read_piped().removesuffix("\n")
    text = "\n\n".join(part for part in (argument, behind) if part)
    if not text:
        usage_error("no prompt: give it as an argument, pipe it in, or run this on a terminal")
    return text


def _variables(items: list[str]) -> str:
    """Return the template's variables as JSON; a value that cannot be sent as such is a text."""
    variables: dict[str, object] = {}
    for item in items:
        name, equals, value = item.partition("=")
        if not equals or not name:
            usage_error(f"--set: {item!r} is not NAME=VALUE, for example enable_thinking=false")
        try:
            variables[name] = json.loads(value)
            json_object(json.dumps({name: variables[name]}))
        except (ValueError, RecursionError):
            variables[name] = value
    return json.dumps(variables) if variables else ""


async def _answer_once(where: Server, talk: Talk, text: str) -> ExitCode:
    async with where.client() as client:
        await _load(client, talk)
        return await _answer(client, talk, text)


def _chat(where: Server, talk: Talk) -> NoReturn:
    """Answer message after message.

    The event loop runs while something is answered only: at the prompt Ctrl-C is the terminal's.

    Raises:
        typer.Exit: always.
    """
    try:
        client = where.client()
    except MlxdError as error:
        raise typer.Exit(report(error, where.address, where.flags)) from error
    with asyncio.Runner() as runner:
        try:
            runner.run(_begin(client, talk))
            converse(
                LineEditor(),
                answer=lambda text: _answer_next(runner, client, talk, text, where.flags),
                forget=talk.messages.clear,
            )
            code = ExitCode.OK
        except (Interrupted, KeyboardInterrupt):
            typer.echo()
            code = ExitCode.INTERRUPTED
        except MlxdError as error:
            code = report(error, where.address, where.flags)
        finally:
            runner.run(client.aclose())
    raise typer.Exit(code)


async def _begin(client: Client, talk: Talk) -> None:
    await client.__aenter__()
    await _load(client, talk)
    typer.echo(f"{talk.model} is ready. /? shows help.", err=True)


def converse(
    editor: LineEditor, *, answer: Callable[[str], None], forget: Callable[[], None]
) -> None:
    """Answer messages until the input ends or a command ends the chat.

    Raises:
        Interrupted: Ctrl-C at the prompt.
    """
    goes_on = True
    while goes_on:
        try:
            goes_on = _turn(editor, answer, forget)
        except KeyboardInterrupt:
            continue  # too late for an answer, too early for the prompt


def _turn(editor: LineEditor, answer: Callable[[str], None], forget: Callable[[], None]) -> bool:
    """Handle one message; return whether the chat continues."""
    text = editor.message()
    if text is None:
        return False
    match text.strip():
        case "":
            pass
        case "/bye" | "/exit" | "/quit":
            return False
        case "/clear":
            forget()
        case "/?" | "/help":
            typer.echo(HELP, err=True)
        case _:
            answer(text)
    return True


def _answer_next(
    runner: asyncio.Runner, client: Client, talk: Talk, text: str, flags: Mapping[str, str]
) -> None:
    """Answer one message; an error or an interrupt leaves the chat unchanged."""
    try:
        runner.run(_answer(client, talk, text))
    except KeyboardInterrupt:
        complain("stopped")
    except MlxdError as error:
        complain(describe(error, flags))


async def _load(client: Client, talk: Talk) -> None:
    async with client.load(talk.model) as updates:
        with ByteBar("waiting", quiet=not sys.stderr.isatty()) as bar:
            async for update in updates:
                bar.show_load(update.model)
                talk.model = update.model.name


async def _answer(client: Client, talk: Talk, text: str) -> ExitCode:
    """Answer a message, and keep it and what was answered, however the answer ends."""
    try:
        return await _stream_answer(client, talk, text)
    except NoChatTemplate:
        for_template = {"--system": talk.system, "--set": talk.variables_json}
        flags = " and ".join(flag for flag, value in for_template.items() if value)
        if flags:
            usage_error(f"{flags}: {talk.model} has no chat template, which alone would read that")
        talk.chats = False
        complain(f"{talk.model} has no chat template: it continues your text without history")
        return await _stream_answer(client, talk, text)


async def _stream_answer(client: Client, talk: Talk, text: str) -> ExitCode:
    parts: list[AnswerPart] = []
    finished: Finished | None = None
    writer = AnswerWriter()
    stream = client.generate(
        talk.prompt(text),
        model=talk.model,
        sampling=talk.sampling,
        max_tokens=talk.max_tokens,
        keep_alive_s=talk.keep_alive_s,
    )
    try:
        async with stream:
            async for event in stream:
                if isinstance(event, Finished):
                    finished = event
                else:
                    parts += event.parts
                    _write(writer, event)
    finally:
        writer.end()
        if parts:
            talk.messages += [ChatMessage("user", text), answer_of(parts)]
    assert finished is not None  # the stream would have raised
    return conclude(finished, "answer", stats=talk.stats)


def _write(writer: AnswerWriter, event: Delta) -> None:
    if not event.parts:
        writer.text(event.text)
    for part in event.parts:
        if part.reasoning:
            writer.reasoning(part.reasoning)
        elif part.text:
            writer.text(part.text)
