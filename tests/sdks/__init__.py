"""Programs that speak to a gateway by other people's packages, each a process of its own.

Each takes the gateway's URL, does one chat with a tool over two turns, and prints one JSON object:
the call's `name` and `arguments`, and the `answer` to the tool's result. Here is what all of them
ask.
"""

from __future__ import annotations

import json
import sys
from typing import Any

MODEL = "chatty"
QUESTION = "How is the weather in Bern?"
RESULT = "rain"
ANSWER_TOKENS = 8
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather.",
        "parameters": SCHEMA,
        "strict": True,
    },
}


def gateway_url() -> str:
    """Return the URL on the command line."""
    return sys.argv[1]


def report(name: str, arguments: object, answer: object) -> None:
    """Print what a chat came to."""
    chat = {"name": name, "arguments": arguments, "answer": answer}
    sys.stdout.write(json.dumps(chat) + "\n")
