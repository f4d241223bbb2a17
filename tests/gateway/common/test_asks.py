"""Names of models as clients send them, and fields as they have named them."""

from __future__ import annotations

import pytest

from mlxd_gateway.common.asks import Ask, name_candidates

NAMES = [
    ("demo", ("demo", "demo:latest")),
    ("demo:latest", ("demo:latest", "demo")),
    ("llama3.2:1b", ("llama3.2:1b",)),
    ("org/name", ("org/name", "org/name:latest")),
    ("org/name:latest", ("org/name:latest", "org/name")),
    ("hf.co/o/m", ("hf.co/o/m", "hf.co/o/m:latest", "o/m", "o/m:latest")),
    ("huggingface.co/o/m:q4", ("huggingface.co/o/m:q4", "o/m:q4")),
    ("host:5000/org/name", ("host:5000/org/name", "host:5000/org/name:latest")),
]


@pytest.mark.parametrize(("name", "candidates"), NAMES)
def test_a_name_as_sent_comes_first(name: str, candidates: tuple[str, ...]) -> None:
    """`:latest` is added or left out, and the hub left out, as clients of Ollama's API have them;
    nothing else is."""
    assert name_candidates(name) == candidates


FIELDS = [
    ("temperature", "sampling.temperature"),
    ("how[3]", "stop[3]"),
    ("messages[1].content", "chat.messages[1].content"),
    ("system.tool_calls[0].arguments", "chat.messages[0].tool_calls[0].arguments_json"),
    ("tools[2]", "chat.tools_json[2]"),
    ("priority", "priority"),
]


@pytest.mark.parametrize(("own", "wire"), FIELDS)
def test_a_field_of_the_wire_has_its_name_in_the_request(own: str, wire: str) -> None:
    """What mlxd refuses by its own name is refused by the request's."""
    ask = Ask("m", "p", fields={"stop": "how"}, places=("system", "messages[1]"))
    assert ask.rename(wire) == own
