"""Answers that are made to take long: each is read in time that grows with its length."""

from __future__ import annotations

import time

import pytest

from mlxd_worker.chat.parsing.registry import OutputFormat
from tests.worker.chat.test_parsing import CODER, DEEPSEEK, GLM, HARMONY, HERMES, Sample, parsed

MANY = 20_000
HOSTILE: dict[str, tuple[OutputFormat, list[str]]] = {
    "calls": (HERMES, ["<tool_call></tool_call>" * MANY]),
    "headers": (HARMONY, ["<|start|>" * MANY]),
    "messages": (HARMONY, ["<|channel|>final<|message|>a<|end|>" * MANY]),
    "a call in pieces": (HARMONY, ["<|channel|>a to=f<|message|>", *["abcdef"] * 5 * MANY]),
    "blanks in a fence": (
        DEEPSEEK, [f"{DEEPSEEK.marks[0]}{DEEPSEEK.marks[2]}f{DEEPSEEK.marks[4]}g```json",
                   " " * 3 * MANY, "x"],
    ),
    "blanks in a function": (CODER, ["<tool_call><function=f>", " " * 3 * MANY, "x</tool_call>"]),
    "keys": (GLM, ["<tool_call>f<arg_key>", "</arg_key><arg_value>" * MANY, "</tool_call>"]),
    "blanks in pieces": (HERMES, ["a", *[" " * 16] * 3 * MANY]),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_time_grows_with_length_alone(name: str) -> None:
    """Whatever an answer holds, and a stream that is resumed comes in one piece."""
    wanted, texts = HOSTILE[name]
    begin_s = time.process_time()
    parsed(Sample(wanted, "", ()), texts)
    assert time.process_time() - begin_s < 2.0
