"""Tools of a chat: what a file may say, and what their commands give back."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from mlxd_controller.cli.chat.tools import (
    SHOWN_CHARS_MAX,
    Tool,
    ToolsNotUsable,
    describe_call,
    read_tools,
    run_command,
)
from mlxd_shared.config import TOOL_RESULT_BYTES_MAX, TOOLS_FILE_BYTES_MAX
from mlxd_shared.domain.chats import ToolCall

WEATHER = {"name": "weather", "parameters": {"type": "object"}}


def tools_of(tmp_path: Path, content: object) -> tuple[Tool, ...]:
    """The tools of a file with this content."""
    path = tmp_path / "tools.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return read_tools(path)


def test_tools_are_sent_as_the_file_has_them(tmp_path: Path) -> None:
    """Wrapped or bare; the command is ours and not the model's."""
    wrapped = {"type": "function", "function": WEATHER}
    first, second = tools_of(
        tmp_path, [wrapped | {"command": ["./w", "-x"]}, {"name": "time", "description": "Now."}]
    )
    assert (first.name, json.loads(first.json_text), first.command) == (
        "weather", wrapped, ("./w", "-x"),
    )  # fmt: skip
    assert (second.name, second.command) == ("time", ())
    assert json.loads(second.json_text) == {"name": "time", "description": "Now."}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "tools.json"), ([], "1 to 1024"), ({}, "1 to 1024"), ([1], r"\[0\]: not an object"),
        ([WEATHER, {"function": {}}], r"\[1\]: a function without a name"),
        ([WEATHER | {"comand": ["x"]}], "'comand' is no key"),
        ([{"function": WEATHER, "name": "x"}], "'name' is no key"),
        ([WEATHER | {"command": ["x\0"]}], "no word may hold a NUL"),
        ([WEATHER | {"command": "x"}], "not a list of words"), ([WEATHER, WEATHER], "one name"),
        (" " * (TOOLS_FILE_BYTES_MAX + 1), "at most"),
    ],
)  # fmt: skip
def test_what_is_no_list_of_tools_is_refused(tmp_path: Path, content: object, words: str) -> None:
    """By file and place."""
    with pytest.raises(ToolsNotUsable, match=words):
        tools_of(tmp_path, content)
    with pytest.raises(ToolsNotUsable, match="cannot be read"):
        read_tools(tmp_path / "none")


def test_a_call_is_shown_as_one_line_that_says_what_it_leaves_out() -> None:
    """Whoever allows it knows that there is more, and no line of it looks like a question."""
    shown = describe_call(ToolCall("t", '{"a":\n"b\x1b[2J"}'))
    assert shown == r'calls t {"a":\x0a"b\x1b[2J"}'
    long = describe_call(ToolCall("t", "x" * (SHOWN_CHARS_MAX + 5)))
    assert long.endswith("x... (13 more characters)")
    assert len(describe_call(ToolCall("t", "x" * (SHOWN_CHARS_MAX - 8)))) == SHOWN_CHARS_MAX


def run_python(program: str, arguments: str = "{}") -> str:
    """The result of a tool that is this program."""
    tool = Tool("t", "{}", (sys.executable, "-c", program))
    return run_command(tool, ToolCall("t", arguments))


def test_a_command_gets_the_arguments_and_prints_the_result() -> None:
    """Within its bound."""
    assert run_python("print(input().upper())", '{"a": "b"}') == '{"A": "B"}'
    assert len(run_python("print('x' * 2_000_000)")) == TOOL_RESULT_BYTES_MAX


def test_a_command_that_fails_is_a_result_too() -> None:
    """The model is told why."""
    failed = run_python("import sys; sys.exit('no such city')")
    assert failed == "error: exit code 1: no such city"
    absent = run_command(Tool("t", "{}", ("/no/such/program",)), ToolCall("t"))
    assert absent == "error: /no/such/program: No such file or directory"
