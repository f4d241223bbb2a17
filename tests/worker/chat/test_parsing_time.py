"""Answers that are made to take long: each is read in time that grows with its length."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from mlxd_worker.chat.parsing.registry import OutputFormat
from tests.worker.chat.test_parsing import (
    CODER,
    DEEPSEEK,
    GLM,
    HARMONY,
    HERMES,
    Sample,
    parse_pieces,
)

MANY = 20_000
TIMES = 8
GROWTH_MAX = 3 * TIMES
"""Where time grows with the square of the length, so much longer takes 64 times as long."""
LITTLE_S = 0.05
TRIES = 20
HOSTILE: dict[str, tuple[OutputFormat, Callable[[int], list[str]]]] = {
    "calls": (HERMES, lambda n: ["<tool_call></tool_call>" * n]),
    "headers": (HARMONY, lambda n: ["<|start|>" * n]),
    "messages": (HARMONY, lambda n: ["<|channel|>final<|message|>a<|end|>" * n]),
    "a call in pieces": (HARMONY, lambda n: ["<|channel|>a to=f<|message|>", *["abcdef"] * 5 * n]),
    "blanks in a fence": (
        DEEPSEEK, lambda n: [f"{DEEPSEEK.marks[0]}{DEEPSEEK.marks[2]}f{DEEPSEEK.marks[4]}g```json",
                             " " * 3 * n, "x"],
    ),
    "blanks in a function": (
        CODER, lambda n: ["<tool_call><function=f>", " " * 3 * n, "x</tool_call>"],
    ),
    "keys": (
        GLM, lambda n: ["<tool_call>f<arg_key>", "</arg_key><arg_value>" * n, "</tool_call>"],
    ),
    "blanks in pieces": (HERMES, lambda n: ["a", *[" " * 16] * 3 * n]),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_time_grows_with_length_alone(name: str) -> None:
    """Whatever an answer holds, and a stream that is resumed comes in one piece."""
    wanted, texts = HOSTILE[name]

    def took_s(count: int) -> float:
        pieces = texts(count)
        begin_s = time.thread_time()
        parse_pieces(Sample(wanted, "", ()), pieces)
        return time.thread_time() - begin_s

    def grows_little() -> bool:
        return took_s(MANY) < GROWTH_MAX * took_s(MANY // TIMES) + LITTLE_S

    # A busy machine makes either slower now and then, but not one of them each time.
    assert any(grows_little() for _ in range(TRIES))
