"""Requests of a coding agent, turn by turn, of the kinds that clients send: Anthropic's API.

Nothing in them is anybody's: texts are drawn at random, the forms are those of clients.

- "marked": the head has a billing header that is another each time; the system says after each
  result how many tokens are left, and now and then more; what it has said stays in its place.
- "counting": what is left stands in the head, and is another each time.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, Literal

Body = dict[str, Any]
Style = Literal["marked", "counting"]
MODEL = "claude-sonnet-4-5"
WORDS = (
    "the",
    "a",
    "file",
    "test",
    "line",
    "turn",
    "value",
    "reads",
    "check",
    "engine",
    "cache",
    "row",
)
TOOLS = ("Read", "Edit", "Bash", "Grep")
HEAD_WORDS, RESULT_WORDS, THOUGHT_WORDS = 1200, 70, 12
QUESTIONS_EVERY, NUDGES_EVERY = 11, 7
"""Turns between two questions of the user's, and between two nudges of the system's."""
_TODAY = "2026-11-24"


def requests(turns: int, *, style: Style, seed: int = 1, today: str = _TODAY) -> list[Body]:
    """Return the bodies of an agent's requests, each with all that was said before."""
    draws = random.Random(seed)
    head = _words(draws, HEAD_WORDS)
    tools = [_tool(name, draws) for name in TOOLS]
    said: list[Body] = [{"role": "user", "content": _question(draws, first=True)}]
    bodies: list[Body] = []
    for turn in range(turns):
        left = 200_000 - 641 * turn
        if style == "marked":
            said = [*said, *_reminders(draws, turn, left)]
        bodies.append(
            {
                "model": MODEL,
                "max_tokens": 1,
                "temperature": 0,
                "system": list(_system(head, style=style, turn=turn, left=left, today=today)),
                "tools": tools,
                "messages": said,
            }
        )
        said = [*said, *_turn(draws, turn)]
    return bodies


def _system(head: str, *, style: Style, turn: int, left: int, today: str) -> Iterator[Body]:
    if style == "marked":
        fields = f"cc_version=2.1.280.{turn:03x}; cc_entrypoint=cli; cch={turn * 7919:05x};"
        yield _text(f"x-anthropic-billing-header: {fields}")
    yield _text("You are an agent for work on programs, at a command line.")
    yield _text(f"<env>\nPlatform: linux\nToday's date: {today}\n</env>\n{head}")
    if style == "counting":
        yield _text(_count_left(left))


def _count_left(tokens: int) -> str:
    return f"<total_tokens>{tokens} tokens left</total_tokens>"


def _reminders(draws: random.Random, turn: int, left: int) -> Iterator[Body]:
    """Yield what the system says behind the last message."""
    yield {"role": "system", "content": [_text(_count_left(left))]}
    if turn % NUDGES_EVERY == NUDGES_EVERY - 1:
        nudge = f"The list of tasks has not been used. {_words(draws, 20)}"
        yield {"role": "system", "content": nudge}


def _turn(draws: random.Random, turn: int) -> Iterator[Body]:
    """Yield an answer, and what comes back for it: a tool's result, or the user's next question."""
    thought = {"type": "thinking", "thinking": _words(draws, THOUGHT_WORDS), "signature": ""}
    if turn % QUESTIONS_EVERY == QUESTIONS_EVERY - 1:
        yield {"role": "assistant", "content": [thought, _text(_words(draws, 30))]}
        yield {"role": "user", "content": _question(draws, first=False)}
        return
    call_id = f"toolu_{turn:04d}"
    path = {"file_path": f"/src/{draws.choice(WORDS)}.py"}
    call = {"type": "tool_use", "id": call_id, "name": draws.choice(TOOLS), "input": path}
    yield {"role": "assistant", "content": [thought, _text(_words(draws, 8)), call]}
    content = _words(draws, RESULT_WORDS)
    yield {
        "role": "user",
        "content": [{"type": "tool_result", "tool_use_id": call_id, "content": content}],
    }


def _question(draws: random.Random, *, first: bool) -> list[Body]:
    context = f"<system-reminder>\nInstructions: {_words(draws, 60)}\n</system-reminder>"
    question = _text(f"Please look at {_words(draws, 15)}.")
    return [_text(context), question] if first else [question]


def _tool(name: str, draws: random.Random) -> Body:
    schema = {
        "type": "object",
        "properties": {"file_path": {"type": "string", "description": _words(draws, 6)}},
        "required": ["file_path"],
    }
    return {"name": name, "description": _words(draws, 40), "input_schema": schema}


def _text(text: str) -> Body:
    return {"type": "text", "text": text}


def _words(draws: random.Random, count: int) -> str:
    return " ".join(draws.choices(WORDS, k=count))
