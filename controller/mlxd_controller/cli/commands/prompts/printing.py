"""Completions for people: one choice behind the other, however they come.

Invariants:
- A choice is printed as it comes once those before it have ended; until then it waits in memory.
- Nothing that a model says steers a terminal.
"""

from __future__ import annotations

import sys

import typer

from mlxd.answers import Delta, Finished
from mlxd_controller.cli.terminal import show
from mlxd_shared.ops.terminal import without_steering


class ChoicePrinter:
    """Prints a stream's events, in the order of its choices."""

    def __init__(self, choices: int, *, by_token: bool) -> None:
        """Print `choices` of them; by_token: a line a token, with its log-probability."""
        self._by_token = by_token
        self._watched = sys.stdout.isatty()
        self._waiting: list[list[str]] = [[] for _ in range(choices)]
        self._has_ended = [False] * choices
        self._turn = -1
        """The choice that is printed as it comes; -1: none has come."""
        self._last_text = ""

    def note(self, event: Delta | Finished) -> None:
        """Print what can be of an event, and of those before it."""
        if isinstance(event, Finished):
            self._has_ended[event.choice] = True
        else:
            self._waiting[event.choice].append(self._text_of(event))
        while self._turn < 0 or self._has_ended[self._turn]:
            if self._turn + 1 == len(self._waiting):
                break
            self._flush()
            self._turn += 1
            self._head()
        self._flush()

    def end_line(self) -> None:
        """End the line that was begun."""
        if self._last_text and not self._last_text.endswith("\n"):
            self._print("\n")

    def _head(self) -> None:
        """Say whose turn it is, where there are several."""
        if len(self._waiting) > 1:
            self.end_line()
            self._print(f"--- choice {self._turn + 1} ---\n")

    def _flush(self) -> None:
        """Print what the choice whose turn it is has waiting."""
        texts = self._waiting[self._turn] if self._turn >= 0 else []
        for text in texts:
            self._print(text)
        texts.clear()

    def _text_of(self, delta: Delta) -> str:
        text = show.logprobs(delta.logprobs) if self._by_token else delta.text
        prompt = delta.prompt
        if prompt is None:
            return text
        lines = show.logprobs(prompt.logprobs)
        between = "\n" if prompt.text and (lines or self._by_token) else ""
        return f"{prompt.text}{between}{lines}{text}"

    def _print(self, text: str) -> None:
        text = without_steering(text) if self._watched else text
        typer.echo(text, nl=False)
        self._last_text = text or self._last_text
