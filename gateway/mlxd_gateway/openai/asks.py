"""What OpenAI's requests ask of a model: pure translation."""

from __future__ import annotations

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
    ToolChoice,
)
from mlxd_gateway.common.asks import Ask
from mlxd_gateway.common.failures import BadField
from mlxd_gateway.common.images import image_of_url
from mlxd_gateway.common.texts import join_objects, json_of
from mlxd_gateway.openai import requests as r
from mlxd_shared import config

FIELDS = MappingProxyType(
    {
        "response_format.json_schema": "response_format.json_schema.schema",
        "text": "prompt",
        "tokens": "prompt",
        "tokens.ids": "prompt",
        "chat.template_variables_json": "chat_template_kwargs",
        "chat.messages": "messages",
        "chat.tools_json": "tools",
        "chat.tool_choice": "tool_choice",
        "chat.tool_name": "tool_choice.function.name",
    }
)
_encode = msgspec.json.encode


def ask_chat(request: r.ChatRequest) -> Ask:
    """Return what a chat's request asks.

    Raises:
        BadField: two fields contradict each other, or one is not what it should be.
    """
    _check_stream(request)
    if request.logprobs is not True and request.top_logprobs is not None:
        raise BadField("top_logprobs", "needs logprobs to be true")
    choice, name = _tool_choice(request.tool_choice)
    places = tuple(f"messages[{index}]" for index in range(len(request.messages)))
    chat = Chat(
        tuple(map(_message, request.messages, places)),
        tools_json=tuple(_encode(tool).decode() for tool in request.tools or ()),
        variables_json=template_variables(request.reasoning_effort, request.chat_template_kwargs),
        tool_choice=choice,
        tool_name=name,
        parallel_tool_calls=request.parallel_tool_calls,
    )
    return Ask(
        model=request.model,
        prompt=chat,
        sampling=_sampling(request),
        max_tokens=_most_tokens(request),
        stop=_stop(request.stop),
        logprobs=(request.top_logprobs or 0) if request.logprobs else None,
        response_format=_format(request.response_format),
        n=_choices(request.n),
        fields={**FIELDS, "max_tokens": _max_tokens_name(request)},
        places=places,
    )


def ask_completions(request: r.CompletionRequest) -> tuple[Ask, ...]:
    """Return what a completion's request asks, prompt by prompt.

    Raises:
        BadField: two fields contradict each other, or one is not what it should be.
    """
    _check_stream(request)
    count = _candidates(request)
    if request.echo and count not in (None, 1):
        raise BadField("echo", "not with n or best_of above 1")
    n_name = "n" if request.best_of is None else "best_of"
    fields = {**FIELDS, "top_logprobs": "logprobs", "prompt_logprobs": "logprobs", "n": n_name}
    # What is compared is needed, even where nobody wants to see it.
    logprobs = 0 if request.logprobs is None and chooses(request) else request.logprobs
    return tuple(
        Ask(
            model=request.model,
            prompt=prompt,
            sampling=_sampling(request),
            max_tokens=request.max_tokens,
            stop=_stop(request.stop),
            logprobs=logprobs,
            n=count,
            echo=request.echo,
            prompt_logprobs=request.logprobs if request.echo else None,
            fields={**fields, "text": name, "tokens": name, "tokens.ids": name},
        )
        for prompt, name in _prompts(request.prompt)
    )


def chooses(request: r.CompletionRequest) -> bool:
    """Return whether more choices are made than are answered."""
    return request.best_of is not None and request.best_of > (request.n or 1)


def texts_of(request: r.EmbeddingRequest) -> str | tuple[str, ...]:
    """Return the text, or the texts, to turn into vectors.

    Raises:
        BadField: tokens instead of texts.
    """
    if isinstance(request.input, str):
        return request.input
    texts = tuple(text for text in request.input if isinstance(text, str))
    if len(texts) < len(request.input):
        raise BadField("input", "texts, not tokens, in this version")
    return texts


def _choices(n: int | None, field: str = "n") -> int | None:
    """Return how many choices are asked for; as many are made room for before anybody is asked."""
    if n is not None and not 1 <= n <= config.CHOICES_MAX:
        raise BadField(field, f"1 to {config.CHOICES_MAX}, not {n}")
    return n


def _candidates(request: r.CompletionRequest) -> int | None:
    """Return how many choices of each prompt are made."""
    answers = _choices(request.n)
    if request.best_of is None:
        return answers
    if request.best_of < (answers or 1):
        raise BadField("best_of", f"{request.best_of} is below n, {answers or 1}")
    if request.stream and chooses(request):
        raise BadField("best_of", "not with stream: what is best is known at the end")
    return _choices(request.best_of, "best_of")


def _check_stream(request: r.ChatRequest | r.CompletionRequest) -> None:
    """Refuse what is said of a stream that is not asked for."""
    if request.stream_options is not None and not request.stream:
        raise BadField("stream_options", "needs stream to be true")


def _tool_choice(sent: object) -> tuple[ToolChoice, str]:
    """Return who decides on calls, and the tool that is called; what is refused was before."""
    match sent:
        case "none":
            return ToolChoice.NONE, ""
        case "required":
            return ToolChoice.REQUIRED, ""
        case r.ChosenTool(function):
            return ToolChoice.REQUIRED, function.name
    return ToolChoice.AUTO, ""


def _prompts(sent: r.Prompts | None) -> list[tuple[str | tuple[int, ...], str]]:
    """Return the prompts, texts or token ids, each with the request's name of it."""
    match sent:
        case None | []:
            raise BadField("prompt", "is needed")
        case str():
            return [(sent, "prompt")]
        case [int(), *_]:
            ids = tuple(token for token in sent if isinstance(token, int))
            if len(ids) == len(sent):
                return [(ids, "prompt")]
        case _ if len(sent) > config.COMPLETION_PROMPTS_MAX:
            limit = f"at most {config.COMPLETION_PROMPTS_MAX} prompts in a request"
            raise BadField("prompt", f"{limit}, not {len(sent)}")
        case [single]:
            return [(_one_prompt(single), "prompt")]
        case _ if len(set(map(type, sent))) == 1:
            return [(_one_prompt(each), f"prompt[{i}]") for i, each in enumerate(sent)]
    raise BadField("prompt", "texts, token ids, or lists of them: no mixture")


def _one_prompt(sent: str | int | list[int]) -> str | tuple[int, ...]:
    assert not isinstance(sent, int), "ids alone are one prompt"
    return sent if isinstance(sent, str) else tuple(sent)


def _sampling(request: r.ChatRequest | r.CompletionRequest) -> SamplingOptions:
    return SamplingOptions(
        temperature=request.temperature,
        top_k=request.top_k,
        top_p=request.top_p,
        min_p=request.min_p,
        repetition_penalty=request.repetition_penalty,
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
        seed=request.seed,
        logit_bias=tuple(
            (_token_id(name), bias) for name, bias in (request.logit_bias or {}).items()
        ),
    )


def _token_id(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) <= 10):
        raise BadField("logit_bias", f"{text[:20]!r} is no token id")
    return int(text)


def _max_tokens_name(request: r.ChatRequest) -> str:
    return "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"


def _most_tokens(request: r.ChatRequest) -> int | None:
    new, old = request.max_completion_tokens, request.max_tokens
    if new is not None and old is not None and new != old:
        raise BadField("max_tokens", "max_completion_tokens says something else")
    return old if new is None else new


def _stop(stop: str | list[str] | None) -> tuple[str, ...]:
    return (stop,) if isinstance(stop, str) else tuple(stop or ())


def _format(
    sent: r.FormatText | r.FormatObject | r.FormatSchema | None,
) -> ResponseFormat | None:
    match sent:
        case r.FormatObject():
            return ResponseFormat(FormatKind.JSON_OBJECT)
        case r.FormatSchema(r.JsonSchema(schema=schema)):
            if not json_of(schema):
                raise BadField("response_format.json_schema.schema", "is needed")
            return ResponseFormat(FormatKind.JSON_SCHEMA, json_of(schema))
        case _:
            return None


def template_variables(effort: str | None, sent: msgspec.Raw) -> str:
    """Return the variables of a template that an effort and the client's own come to, as JSON.

    Raises:
        BadField: the client's own are no object; names chat_template_kwargs.
    """
    own: dict[str, object] = {} if effort is None else {"reasoning_effort": effort}
    if effort == "none":
        own["enable_thinking"] = False
    return join_objects(own, sent, "chat_template_kwargs")


def _message(
    message: r.Developer | r.System | r.User | r.Assistant | r.Tool, place: str
) -> ChatMessage:
    role = str(message.__struct_config__.tag)
    content = _text(message.content)
    parts = _parts(message.content, place)
    match message:
        case r.Assistant():
            if message.reasoning and message.reasoning_content:
                raise BadField(f"{place}.reasoning", "reasoning_content says it too")
            calls = (
                ToolCall(call.function.name, call.function.arguments or "{}", call.id)
                for call in message.tool_calls or ()
            )
            return ChatMessage(
                role,
                content,
                reasoning=message.reasoning_content or message.reasoning or "",
                tool_calls=tuple(calls),
                name=message.name or "",
                parts=parts,
            )
        case r.Tool():
            name = message.name or ""
            call_id = message.tool_call_id
            return ChatMessage(role, content, tool_call_id=call_id, name=name, parts=parts)
        case _:
            return ChatMessage(role, content, name=message.name or "", parts=parts)


def _parts(content: r.Content | None, place: str) -> tuple[ContentPart, ...]:
    """Return the parts of a message that shows images; none where it is a text."""
    if content is None or isinstance(content, str):
        return ()
    if not any(isinstance(part, r.Image) for part in content):
        return ()
    return tuple(
        image_of_url(part.image_url.url, f"{place}.content[{index}].image_url.url")
        if isinstance(part, r.Image)
        else ContentPart(_text([part]))
        for index, part in enumerate(content)
    )


def _text(content: r.Content | None) -> str:
    """Return what a message says; empty where it shows images: then its parts say it."""
    if content is None or isinstance(content, str):
        return content or ""
    if any(isinstance(part, r.Image) for part in content):
        return ""
    parts = (part.refusal if isinstance(part, r.Refusal) else part for part in content)
    return "\n".join(part.text if isinstance(part, r.Text) else str(part) for part in parts)
