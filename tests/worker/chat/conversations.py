"""Conversations with tools and odd content, as templates are given them."""

from __future__ import annotations

import json
from typing import Any

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather at a place. Über \"quoted\" <b>&amp; 'single'</b>",
        "parameters": {
            "type": "object",
            "properties": {
                "place": {"type": "string", "description": "Where"},
                "days": {"type": "integer", "description": "How many", "enum": [1, 2]},
                "how": {
                    "type": "object",
                    "description": "Nested",
                    "properties": {"unit": {"type": "string", "description": "C or F"}},
                    "required": [],
                },
                "tags": {"type": "array", "items": {"type": "string"}, "description": "Any"},
            },
            "required": ["place"],
        },
    },
}
CLOCK: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "now",
        "description": "The time",
        "parameters": {"type": "object", "properties": {}, "required": []},
    },
}
SIMPLE: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Looks",
        "parameters": {
            "type": "object",
            "properties": {"at": {"type": "string", "description": "What"}},
            "required": ["at"],
        },
    },
}
ARGUMENTS = {"place": 'Zürich "HB"\n', "days": 2, "how": {"unit": "C"}, "tags": ["a", "<b>"]}


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: str | None, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def tool_call(name: str, arguments: object, call_id: str = "abc123def") -> dict[str, Any]:
    return {
        "id": call_id,
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def tool_answer(content: str, call_id: str = "abc123def") -> dict[str, Any]:
    return {"role": "tool", "content": content, "tool_call_id": call_id, "name": "get_weather"}


SYSTEM = {"role": "system", "content": "You are {{ terse }}.\n\n  Keep {% it %} short.  "}
ODD = [
    "Hello",
    "  leading, trailing and   inner   spaces  \n",
    "> a quote\n- a list\n\n```python\nif a < b: print('<|x|>')\n```",
    "emoji 🙂🏽 日本語 עברית\u200b\u00a0\u2028 'single' \"double\"",
    "\\n back\\slash {{ braces }} {% %}",
    "<b>html</b> &amp; <not_a_token> [INSTR] ends with <",
    "",
]
Case = tuple[list[dict[str, Any]], list[dict[str, Any]] | None, dict[str, Any]]


def plain_cases() -> list[Case]:
    """Conversations without tools."""
    turns = [user("Hi"), assistant("Hello! How can I help?"), user("  More, please \n")]
    thought = [user("2+2?"), assistant("4", reasoning_content="Two and two.\n"), user("And 3+3?")]
    inline = [user("2+2?"), assistant("<think>\nhm\n</think>\n\n4"), user("And 3+3?")]
    begun = {"add_generation_prompt": True}
    return [
        *(([SYSTEM, user(text)], None, begun) for text in ODD),
        ([user("Hi")], None, begun),
        ([user("Hi")], None, {"add_generation_prompt": False}),
        (turns, None, begun),
        ([SYSTEM, *turns], None, {"add_generation_prompt": False}),
        (thought, None, begun),
        (inline, None, begun),
        (turns, None, {**begun, "enable_thinking": False}),
        (turns, None, {**begun, "enable_thinking": True}),
        (turns, None, {**begun, "thinking": True, "reasoning_effort": "low"}),
        ([user("a"), user("b")], None, begun),
        ([assistant("first")], None, begun),
    ]


def tool_cases(*, as_text: bool) -> list[Case]:
    """Conversations with tools; `as_text`: the arguments of calls are JSON text."""

    def as_given(value: dict[str, Any]) -> object:
        return json.dumps(value, ensure_ascii=False) if as_text else value

    one = [
        user("Weather?"),
        assistant(None, tool_calls=[tool_call("get_weather", as_given(ARGUMENTS))]),
    ]
    done = [*one, tool_answer('{"t": 21, "sky": "<clear> & blue"}')]
    two = [
        user("Weather, and the time?"),
        assistant(
            "I look both up.",
            tool_calls=[
                tool_call("get_weather", as_given({"place": "Bern"})),
                tool_call("now", as_given({}), "ghi456jkl"),
            ],
        ),
        tool_answer("rain"),
        {**tool_answer("12:00", "ghi456jkl"), "name": "now"},
    ]
    thought = [
        user("Weather?"),
        assistant(
            "", reasoning_content="A tool.", tool_calls=[tool_call("get_weather", as_given({}))]
        ),
        tool_answer("sun"),
        assistant("Sunny."),
        user("Thanks"),
    ]
    tools = [WEATHER, CLOCK]
    begun = {"add_generation_prompt": True}
    return [
        ([SYSTEM, user("Weather?")], tools, begun),
        ([SYSTEM, user("Look!")], [SIMPLE], begun),
        (done, tools, begun),
        ([SYSTEM, *done, assistant("Nice."), user("ok")], tools, begun),
        (two, tools, {"add_generation_prompt": False}),
        (two, [WEATHER], {**begun, "enable_thinking": False}),
        (thought, tools, begun),
        (one, None, {"add_generation_prompt": False}),
    ]
