"""One message of a chat, answered: streamed, with the calls in the answer and their results.

Invariants:
- What was answered is kept however it ends, except an answer whose calls have no results: then the
  conversation is as it was before the message.
- A call is answered by what the user types, or by a command that the user has allowed.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import typer

from mlxd import Client
from mlxd.answers import Delta, Finished
from mlxd_controller.cli.chat import tools as t
from mlxd_controller.cli.chat.editor import Editor
from mlxd_controller.cli.chat.talk import Talk
from mlxd_controller.cli.commands.prompts.generate import conclude
from mlxd_controller.cli.outcome import ExitCode, complain, usage_error
from mlxd_controller.cli.terminal.answers import AnswerWriter
from mlxd_shared.config import TOOL_ROUNDS_MAX
from mlxd_shared.domain.chats import AnswerPart, ChatMessage, ToolCall, answer_of
from mlxd_shared.domain.errors import NoChatTemplate
from mlxd_shared.ops.terminal import escape, escape_line

Run = Callable[[Coroutine[Any, Any, ExitCode]], ExitCode]


async def answer_once(client: Client, talk: Talk, text: str) -> ExitCode:
    """Answer one message; calls in the answer are shown, and nobody answers them."""
    turn = [talk.say(text)]
    with _keeping(talk, turn):
        return await _stream(client, talk, turn)


class Answerer:
    """Answers the messages of a chat, one at a time. Main thread; `run` runs the event loop."""

    def __init__(self, run: Run, client: Client, talk: Talk, editor: Editor) -> None:
        self._run = run
        self._client = client
        self._talk = talk
        self._editor = editor
        self._allowed: set[str] = set()
        """Tools whose commands the user has allowed for the rest of the chat."""

    def answer(self, text: str) -> None:
        """Answer a message, and the calls in the answer, until there are no more.

        Raises:
            KeyboardInterrupt, MlxdError: it was stopped, or failed.
        """
        turn = [self._talk.say(text)]
        tools = t.by_name(self._talk.tools)
        with _keeping(self._talk, turn):
            for _ in range(TOOL_ROUNDS_MAX):
                self._run(_stream(self._client, self._talk, turn))
                calls = turn[-1].tool_calls
                if not calls:
                    return
                turn += [self._result(call, tools.get(call.name)) for call in calls]
            complain(f"{TOOL_ROUNDS_MAX} answers in a row had calls: no more are made")

    def answer_again(self) -> None:
        """Answer the last message anew; the old answer stays where there is no new one.

        Raises:
            KeyboardInterrupt, MlxdError: it was stopped, or failed.
        """
        before = list(self._talk.messages)
        text = self._talk.take_last()
        kept = len(self._talk.messages)
        try:
            self.answer(text)
        finally:
            if len(self._talk.messages) == kept:
                self._talk.messages[:] = before

    def _result(self, call: ToolCall, tool: t.Tool | None) -> ChatMessage:
        if tool is not None and tool.command and self._may_run(tool):
            text = t.run_command(tool, call)
            typer.echo(escape(text), err=True)
            return t.result_of(call, text)
        return t.result_of(call, self._editor.ask(f"result of {escape_line(call.name)}: "))

    def _may_run(self, tool: t.Tool) -> bool:
        if tool.name in self._allowed:
            return True
        command = escape_line(" ".join(tool.command))
        said = self._editor.ask(f"run {command}? y: yes, a: always, n: type the result: ").lower()
        if said in {"a", "always"}:
            self._allowed.add(tool.name)
        return said in {"y", "yes", "a", "always"}


@contextmanager
def _keeping(talk: Talk, turn: Sequence[ChatMessage]) -> Iterator[None]:
    """Add a turn to the conversation when the block ends, if it is whole, however it ends."""
    try:
        yield
    finally:
        if turn[-1].role == "assistant" and not turn[-1].tool_calls:
            talk.messages += turn
        else:
            talk.images = turn[0].images


async def _stream(client: Client, talk: Talk, turn: list[ChatMessage]) -> ExitCode:
    """Answer a turn so far, and add the answer to it, however it ends."""
    try:
        return await _stream_answer(client, talk, turn)
    except NoChatTemplate:
        for_template = {
            "--system": talk.system,
            "--set": talk.variables,
            "--tools": talk.tools,
            "--image": turn[0].images,
        }
        flags = " and ".join(flag for flag, value in for_template.items() if value)
        if flags:
            usage_error(f"{flags}: {talk.model} has no chat template, which alone would read that")
        talk.chats = False
        complain(f"{talk.model} has no chat template: it continues your text without history")
        return await _stream_answer(client, talk, turn)


async def _stream_answer(client: Client, talk: Talk, turn: list[ChatMessage]) -> ExitCode:
    parts: list[AnswerPart] = []
    finished: Finished | None = None
    writer = AnswerWriter(wrap=talk.wrap)
    stream = client.generate(
        talk.prompt(turn),
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
            turn.append(answer_of(parts))
    assert finished is not None  # the stream would have raised
    return conclude(finished, "answer", stats=talk.stats)


def _write(writer: AnswerWriter, event: Delta) -> None:
    if not event.parts:
        writer.text(event.text)
    for part in event.parts:
        if part.reasoning:
            writer.reasoning(part.reasoning)
        elif part.tool_call is not None:
            writer.end()
            writer.text(f"{t.describe_call(part.tool_call)}\n")
        elif part.text:
            writer.text(part.text)
