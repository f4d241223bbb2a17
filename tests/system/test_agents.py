"""An agent's long conversation through gateway, controller and worker: what each turn evaluates."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from mlxd_controller.store.aliases import set_alias
from tests.support.gateways import Web, serve_web
from tests.support.random_model import TINY, write_dense_model
from tests.support.transcripts import Body, Style, requests

TEMPLATES = Path(__file__).parents[1] / "data" / "templates"
REFUSING, HOISTING = "qwen38_chat_template.jinja", "deepseek-ai-DeepSeek-V3.1.jinja"
"""Of a system's message in the middle: one refuses it, the other moves it to the head."""
SHAPE = replace(TINY, layers=1, heads=2, kv_heads=1, context=32768)
TURNS = 30
PROMPT_TOKENS = 20_000
AGAIN_MAX = 128
"""Tokens that a turn may evaluate again, beside its new ones."""


@dataclass(frozen=True, slots=True)
class Turn:
    """What one request cost, in tokens."""

    prompt: int
    evaluated: int


@asynccontextmanager
async def serve_agent(folder: Path, template: str, *options: str) -> AsyncIterator[Web]:
    """Serve a small model with such a template, to whom asks for `claude-*`."""
    model = write_dense_model(folder / "models" / "small", shape=SHAPE)
    shutil.copy(TEMPLATES / template, model / "chat_template.jinja")
    set_alias(folder / "models", "claude-*", "small")
    async with serve_web("--models-dir", str(folder / "models"), *options) as web:
        yield web


async def play(web: Web, bodies: Sequence[Body]) -> list[Turn]:
    """Send requests one after another; return what each cost."""
    turns: list[Turn] = []
    for body in bodies:
        answer = await web.post("/v1/messages", body)
        assert answer.status_code == 200, answer.text
        usage = answer.json()["usage"]
        cached = usage["cache_read_input_tokens"]
        turns.append(Turn(usage["input_tokens"] + cached, usage["input_tokens"]))
    return turns


def count_again(turns: Sequence[Turn]) -> list[int]:
    """Return how many tokens each turn but the first evaluated beside its new ones."""
    return [
        turn.evaluated - (turn.prompt - before.prompt) for before, turn in itertools.pairwise(turns)
    ]


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("style", "template"),
    [("marked", REFUSING), ("marked", HOISTING), ("counting", HOISTING)],
)
async def test_a_turn_evaluates_what_is_new(style: Style, template: str, tmp_path: Path) -> None:
    """From turn 2 at most the new tokens and AGAIN_MAX, over 30 turns and 20,000 tokens.

    Another day's conversation finds what comes before the date.
    """
    bodies = requests(TURNS, style=style)
    tomorrow = requests(1, style=style, today="2026-11-25")
    async with serve_agent(tmp_path, template) as web:
        turns = await play(web, bodies)
        (other_day,) = await play(web, tomorrow)
    again = count_again(turns)
    assert turns[-1].prompt >= PROMPT_TOKENS, turns[-1]
    assert turns[0].evaluated == turns[0].prompt
    assert max(again) <= AGAIN_MAX, again
    assert other_day.evaluated < other_day.prompt / 4, other_day


@pytest.mark.asyncio
async def test_without_the_rules_it_begins_anew(tmp_path: Path) -> None:
    """Each turn evaluates nearly all of its prompt; a template that refuses does so."""
    bodies = requests(4, style="marked")
    async with serve_agent(tmp_path, HOISTING, "--no-agent-rules") as web:
        turns = await play(web, bodies)
    assert all(turn.evaluated > 0.9 * turn.prompt for turn in turns), turns
    async with serve_agent(tmp_path / "again", REFUSING, "--no-agent-rules") as web:
        status, error = await web.error("/v1/messages", bodies[0])
    assert (status, "messages" in error["error"]["message"]) == (400, True)
