"""What Ollama's requests ask of a model: pure translation."""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import MappingProxyType

import msgspec

from mlxd import (
    Chat,
    ChatMessage,
    ContentPart,
    FormatKind,
    ResponseFormat,
    SamplingOptions,
    ToolCall,
)
from mlxd_gateway.common.asks import Ask
from mlxd_gateway.common.failures import BadField
from mlxd_gateway.common.images import image_of_base64
from mlxd_gateway.common.texts import json_of
from mlxd_gateway.ollama import requests as r
from mlxd_shared.domain.units import parse_duration

FIELDS = MappingProxyType(
    {
        "sampling.repetition_penalty": "options.repeat_penalty",
        "sampling": "options",
        "max_tokens": "options.num_predict",
        "stop": "options.stop",
        "text": "prompt",
        "response_format.json_schema": "format",
        "chat.template_variables_json": "think",
        "chat.messages": "messages",
        "chat.tools_json": "tools",
    }
)


def ask_chat(request: r.ChatRequest) -> Ask:
    """Return what a chat's request asks.

    Raises:
        BadField: a field is not what it should be.
    """
    messages = request.messages or []
    places = tuple(f"messages[{index}]" for index in range(len(messages)))
    chat = Chat(
        tuple(_message(message, places[at]) for at, message in enumerate(messages)),
        tools_json=tuple(msgspec.json.encode(tool).decode() for tool in request.tools or ()),
        variables_json=_variables(request.think),
    )
    return _ask(request, chat, places=places)


def ask_generate(request: r.GenerateRequest) -> Ask:
    """Return what a completion's request asks: a chat of one turn, but where it is `raw`.

    A model without a template for chats continues the prompt.

    Raises:
        BadField: a field is not what it should be.
    """
    prompt = request.prompt or ""
    if request.raw:
        if request.system:
            raise BadField("system", "means nothing with raw")
        if request.think:
            raise BadField("think", "means nothing with raw")
        if request.images:
            raise BadField("images", "means nothing with raw")
        return _ask(request, prompt)
    system = (ChatMessage("system", request.system),) if request.system else ()
    parts = _parts(prompt, request.images, "images")
    said = ChatMessage("user", "" if parts else prompt, parts=parts)
    chat = Chat((*system, said), variables_json=_variables(request.think))
    own = f"chat.messages[{len(system)}]"
    places = ("system", own) if system else (own,)
    fields = {f"{own}.images": "images", own: "prompt", **FIELDS}
    plain = f"{request.system}\n\n{prompt}" if request.system else prompt
    return _ask(request, chat, places=places, fields=fields, plain=None if parts else plain)


def keep_alive_s(value: float | str | None) -> float | None:
    """Return how long a model stays, in seconds; math.inf: for ever; None: as before.

    Raises:
        BadField: it is no duration.
    """
    if value is None:
        return None
    try:
        return parse_duration(str(value))
    except ValueError as error:
        raise BadField("keep_alive", str(error)) from error


def _ask(
    request: r.ChatRequest | r.GenerateRequest,
    prompt: str | Chat,
    *,
    places: tuple[str, ...] = (),
    fields: Mapping[str, str] = FIELDS,
    plain: str | None = None,
) -> Ask:
    options = request.options or r.Options()
    if request.logprobs is not True and request.top_logprobs:
        raise BadField("top_logprobs", "needs logprobs to be true")
    most = options.num_predict
    stop = options.stop
    return Ask(
        model=request.model,
        prompt=prompt,
        sampling=SamplingOptions(
            temperature=options.temperature,
            top_k=options.top_k,
            top_p=options.top_p,
            min_p=options.min_p,
            repetition_penalty=options.repeat_penalty,
            presence_penalty=options.presence_penalty,
            frequency_penalty=options.frequency_penalty,
            repeat_last_n=options.repeat_last_n,
            seed=options.seed,
        ),
        max_tokens=None if most is None or most < 1 else most,
        stop=(stop,) if isinstance(stop, str) else tuple(stop or ()),
        logprobs=(request.top_logprobs or 0) if request.logprobs else None,
        response_format=_format(request.format),
        keep_alive_s=keep_alive_s(request.keep_alive),
        plain=plain,
        fields=fields,
        places=places,
        images_at=r".images[\g<index>]",
    )


def _parts(text: str, images: list[str] | None, place: str) -> tuple[ContentPart, ...]:
    """Return the parts of a message that shows images, its text last; none where it is a text."""
    shown = [
        image_of_base64(image, f"{place}[{index}]") for index, image in enumerate(images or ())
    ]
    return (*shown, *([ContentPart(text)] if text else [])) if shown else ()


def _message(message: r.Message, place: str) -> ChatMessage:
    calls = (
        ToolCall(call.function.name, bytes(call.function.arguments).decode(), call.id)
        for call in message.tool_calls or ()
    )
    parts = _parts(message.content or "", message.images, f"{place}.images")
    return ChatMessage(
        message.role,
        "" if parts else message.content or "",
        reasoning=message.thinking or "",
        tool_calls=tuple(calls),
        tool_call_id=message.tool_call_id or "",
        name=message.tool_name or "",
        parts=parts,
    )


def _format(sent: msgspec.Raw) -> ResponseFormat | None:
    text = json_of(sent)
    match text:
        case "" | '""':
            return None
        case '"json"':
            return ResponseFormat(FormatKind.JSON_OBJECT)
        case _ if text.startswith("{"):
            return ResponseFormat(FormatKind.JSON_SCHEMA, text)
        case _:
            raise BadField("format", 'is neither "json" nor a JSON schema')


def _variables(think: bool | str | None) -> str:  # noqa: FBT001 - a value of the request
    if think is None:
        return ""
    if isinstance(think, bool):
        return json.dumps({"enable_thinking": think})
    return json.dumps({"enable_thinking": True, "reasoning_effort": think})
