"""What a request for a response asks of a model: pure translation."""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType

import msgspec

from mlxd import Chat, FormatKind, ResponseFormat, SamplingOptions, ToolChoice
from mlxd_gateway.common.asks import Ask
from mlxd_gateway.common.failures import BadField
from mlxd_gateway.common.texts import json_of
from mlxd_gateway.openai.asks import template_variables
from mlxd_gateway.openai.requests import FormatObject
from mlxd_gateway.openai.responses import requests as r
from mlxd_gateway.openai.responses.conversations import Conversation, Placed
from mlxd_gateway.openai.responses.items import Item
from mlxd_shared import config

PREVIOUS = "previous_response_id"
PAIRS_MAX, KEY_CHARS_MAX, VALUE_CHARS_MAX = 16, 64, 512
"""Of metadata, as OpenAI has it."""
FIELDS = MappingProxyType(
    {
        "max_tokens": "max_output_tokens",
        "logprobs": "top_logprobs",
        "response_format.json_schema": "text.format.schema",
        "chat.template_variables_json": "chat_template_kwargs",
        "chat.messages": "input",
        "chat.tools_json": "tools",
        "chat.tool_choice": "tool_choice",
        "chat.tool_name": "tool_choice.name",
    }
)


def ask_response(request: r.ResponseRequest, history: Sequence[Item]) -> Ask:
    """Return what a request asks; `history` is what was said before it, of earlier responses.

    Raises:
        BadField: two fields contradict each other, or one is not what it should be.
    """
    _check_metadata(request.metadata or {})
    conversation = Conversation()
    if request.instructions:
        conversation.say("system", request.instructions, "instructions")
    conversation.extend(_place(request, history))
    if isinstance(request.input, str):
        conversation.say("user", request.input, "input")
    messages, names = conversation.end()
    choice, name = _tool_choice(request.tool_choice)
    reasoning = request.reasoning or r.ReasoningConfig()
    chat = Chat(
        messages,
        tools_json=tuple(_tool(tool) for tool in request.tools or ()),
        variables_json=template_variables(reasoning.effort, request.chat_template_kwargs),
        tool_choice=choice,
        tool_name=name,
        parallel_tool_calls=request.parallel_tool_calls,
    )
    return Ask(
        model=request.model,
        prompt=chat,
        sampling=SamplingOptions(
            temperature=request.temperature,
            top_k=request.top_k,
            top_p=request.top_p,
            min_p=request.min_p,
            repetition_penalty=request.repetition_penalty,
            seed=request.seed,
        ),
        max_tokens=request.max_output_tokens,
        logprobs=_logprobs(request),
        response_format=_format(request.text),
        fields={**names, **FIELDS},
        places=tuple(f"chat.messages[{index}]" for index in range(len(messages))),
    )


def _place(request: r.ResponseRequest, history: Sequence[Item]) -> list[Placed]:
    """Return what was said before and what the request's list says, with the field of each."""
    placed = [(PREVIOUS, item) for item in history]
    if not isinstance(request.input, str):
        placed += [(f"input[{index}]", item) for index, item in enumerate(request.input)]
    if len(placed) > config.HTTP_ITEMS_MAX:
        problem = f"{len(placed)} items with those before them, and at most {config.HTTP_ITEMS_MAX}"
        raise BadField("input", problem)
    return placed


def _check_metadata(metadata: dict[str, str]) -> None:
    if len(metadata) > PAIRS_MAX:
        raise BadField("metadata", f"at most {PAIRS_MAX} pairs, not {len(metadata)}")
    for key, text in metadata.items():
        if len(key) > KEY_CHARS_MAX or len(text) > VALUE_CHARS_MAX:
            problem = f"keys of {KEY_CHARS_MAX} characters, and values of {VALUE_CHARS_MAX}"
            raise BadField(f"metadata.{key[:KEY_CHARS_MAX]}", problem)


def _logprobs(request: r.ResponseRequest) -> int | None:
    """Return how many of the best tokens come with each one; None: no log-probabilities."""
    if r.LOGPROBS in (request.include or ()):
        return request.top_logprobs or 0
    if request.top_logprobs:
        raise BadField("top_logprobs", f"needs include to name {r.LOGPROBS}")
    return None


def _tool_choice(sent: object) -> tuple[ToolChoice, str]:
    """Return who decides on calls, and the tool that is called; what is refused was before."""
    match sent:
        case "none":
            return ToolChoice.NONE, ""
        case "required":
            return ToolChoice.REQUIRED, ""
        case r.ChosenFunction(name):
            return ToolChoice.REQUIRED, name
    return ToolChoice.AUTO, ""


def _tool(tool: r.Tool) -> str:
    assert isinstance(tool, r.FunctionTool), "others were refused"
    function: dict[str, object] = {"name": tool.name}
    if tool.description is not None:
        function["description"] = tool.description
    if json_of(tool.parameters):
        function["parameters"] = tool.parameters
    if tool.strict is not None:
        function["strict"] = tool.strict
    return msgspec.json.encode({"type": "function", "function": function}).decode()


def _format(text: r.TextConfig | None) -> ResponseFormat | None:
    match None if text is None else text.format:
        case FormatObject():
            return ResponseFormat(FormatKind.JSON_OBJECT)
        case r.FormatSchema(schema=schema):
            if not json_of(schema):
                raise BadField("text.format.schema", "is needed")
            return ResponseFormat(FormatKind.JSON_SCHEMA, json_of(schema))
        case _:
            return None
