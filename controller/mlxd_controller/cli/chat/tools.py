"""Tools of a chat: a JSON file of functions, shown to the model, and who answers its calls.

    [{"type": "function", "function": {"name": "weather", "parameters": {...}},
      "command": ["./weather"]}]

Each entry is what the wire takes (the function alone will do), and may have a command besides. It
gets the arguments, a JSON object, as its standard input, and what it prints is the result.

Invariants:
- Nothing is run that the file does not name, and nothing before the user has said yes.
- A command has TOOL_COMMAND_S, and TOOL_RESULT_BYTES_MAX of its output count. One that fails is a
  result too: the model is told.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from mlxd_shared import config
from mlxd_shared.domain.chats import ChatMessage, ToolCall
from mlxd_shared.ops.terminal import escape_line

_WRAPPED = frozenset({"type", "function", "command"})
_BARE = frozenset({"name", "description", "parameters", "strict", "command"})
SHOWN_CHARS_MAX = 2000
"""Of a call on a screen."""


class ToolsNotUsable(Exception):
    """What is wrong with a file of tools, for its user."""


@dataclass(frozen=True, slots=True)
class Tool:
    """A function, as the wire has it, and the command that answers its calls; () for none."""

    name: str
    json_text: str
    command: tuple[str, ...] = ()


def read_tools(path: Path) -> tuple[Tool, ...]:
    """Return the tools of a file.

    Raises:
        ToolsNotUsable: it cannot be read, or is no list of tools; names the entry.
    """
    try:
        with path.open("rb") as file:
            raw = file.read(config.TOOLS_FILE_BYTES_MAX + 1)
    except OSError as error:
        raise ToolsNotUsable(f"{path}: cannot be read: {error.strerror}") from error
    if len(raw) > config.TOOLS_FILE_BYTES_MAX:
        raise ToolsNotUsable(f"{path}: at most {config.TOOLS_FILE_BYTES_MAX} bytes are read")
    try:
        tools = _tools(json.loads(raw))
    except (ValueError, RecursionError) as error:
        raise ToolsNotUsable(f"{path}: {error}") from error
    names = [tool.name for tool in tools]
    if len(set(names)) < len(names):
        raise ToolsNotUsable(f"{path}: two tools have one name")
    return tools


def _tools(entries: object) -> tuple[Tool, ...]:
    if not isinstance(entries, list) or not 0 < len(entries) <= config.CHAT_TOOLS_MAX:
        raise ValueError(f"not a list of 1 to {config.CHAT_TOOLS_MAX} tools")
    return tuple(_tool(entry, place) for place, entry in enumerate(entries))


def _tool(entry: object, place: int) -> Tool:
    if not isinstance(entry, dict):
        raise ValueError(f"[{place}]: not an object")  # noqa: TRY004 - of the text
    allowed = _WRAPPED if "function" in entry else _BARE
    unknown = sorted(entry.keys() - allowed)
    if unknown:
        raise ValueError(f"[{place}]: {unknown[0]!r:.80} is no key of a tool")
    command = entry.pop("command", [])
    if not isinstance(command, list) or not all(isinstance(word, str) for word in command):
        raise ValueError(f"[{place}].command: not a list of words")
    if any("\0" in word for word in command):
        raise ValueError(f"[{place}].command: no word may hold a NUL character")
    function = entry.get("function", entry)
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or not name:
        raise ValueError(f"[{place}]: a function without a name")
    return Tool(name, json.dumps(entry), tuple(command))


def describe_call(call: ToolCall) -> str:
    """Return a call in one line, for people: they allow what it does, so what is cut is said."""
    text = escape_line(f"calls {call.name} {call.arguments_json}")
    left_out = len(text) - SHOWN_CHARS_MAX
    return f"{text[:SHOWN_CHARS_MAX]}... ({left_out} more characters)" if left_out > 0 else text


def result_of(call: ToolCall, text: str) -> ChatMessage:
    """Return the message that tells the model a call's result."""
    return ChatMessage("tool", content=text, tool_call_id=call.id, name=call.name)


def by_name(tools: Iterable[Tool]) -> Mapping[str, Tool]:
    """Return tools by their functions' names."""
    return {tool.name: tool for tool in tools}


def run_command(tool: Tool, call: ToolCall) -> str:
    """Run a tool's command for a call, and return what the model is told. Blocks."""
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as problems:
        try:
            done = subprocess.run(
                tool.command, input=call.arguments_json.encode(), stdout=output, stderr=problems,
                timeout=config.TOOL_COMMAND_S, check=False,
            )  # fmt: skip
        except OSError as error:
            return f"error: {tool.command[0]}: {error.strerror}"
        except subprocess.TimeoutExpired:
            return f"error: no result after {config.TOOL_COMMAND_S:.0f} s"
        stream = problems if done.returncode else output
        stream.seek(0)
        text = stream.read(config.TOOL_RESULT_BYTES_MAX).decode(errors="replace").strip()
    return f"error: exit code {done.returncode}: {text}" if done.returncode else text
