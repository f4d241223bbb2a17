"""The requests of OpenAI's API: each field once, with what becomes of it.

Beside OpenAI's own fields stand those that clients of other servers of this API send (`top_k`,
`chat_template_kwargs`, `reasoning_content`).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from mlxd_gateway.common.fates import honoured, passed_over, refused
from mlxd_gateway.common.texts import ABSENT

NO_SOUND = "no model here speaks"
NO_SIGHT = "no model here sees or hears: text alone"
OF_ACCOUNT = "concerns an account with OpenAI"


class Text(msgspec.Struct, tag="text", forbid_unknown_fields=True):
    """A part of a message: text."""

    text: str
    prompt_cache_breakpoint: Annotated[Any, passed_over("prefixes are kept by themselves")] = None


class Refusal(msgspec.Struct, tag="refusal", forbid_unknown_fields=True):
    """A part of an assistant's message: what it said instead of an answer."""

    refusal: str


class Image(msgspec.Struct, tag="image_url"):
    """A part of a message that is no text."""

    image_url: Annotated[Any, refused(NO_SIGHT)]


class Audio(msgspec.Struct, tag="input_audio"):
    """A part of a message that is no text."""

    input_audio: Annotated[Any, refused(NO_SIGHT)]


class File(msgspec.Struct, tag="file"):
    """A part of a message that is no text."""

    file: Annotated[Any, refused(NO_SIGHT)]


Prompts = str | list[str | int | list[int]]
"""One text, several, or the same as token ids."""
Content = str | list[Text | Refusal | Image | Audio | File]


class _Message(msgspec.Struct, tag_field="role", forbid_unknown_fields=True, kw_only=True):
    content: Content
    name: str | None = None


class Developer(_Message, tag="developer"):
    """What the application says."""


class System(_Message, tag="system"):
    """What the application says."""


class User(_Message, tag="user"):
    """What the user says."""


class Tool(_Message, tag="tool"):
    """What a tool answers."""

    tool_call_id: str


class CalledFunction(msgspec.Struct, forbid_unknown_fields=True):
    """The function of a call; `arguments` is JSON."""

    name: str
    arguments: str


class Call(msgspec.Struct, forbid_unknown_fields=True):
    """A call that an assistant made."""

    id: str
    function: CalledFunction
    type: Literal["function"] = "function"
    index: Annotated[Any, passed_over("part of an answer that is sent back")] = None


class Assistant(_Message, tag="assistant", kw_only=True):
    """What the model said."""

    content: Content | None = None  # type: ignore[assignment]
    tool_calls: list[Call] | None = None
    reasoning_content: Annotated[str | None, honoured("the reasoning before the content")] = None
    reasoning: Annotated[str | None, honoured("another name of reasoning_content")] = None
    refusal: Annotated[Any, passed_over("part of an answer that is sent back")] = None
    annotations: Annotated[Any, passed_over("part of an answer that is sent back")] = None
    audio: Annotated[Any, refused(NO_SOUND)] = None
    function_call: Annotated[Any, refused("the older form of tool_calls")] = None


class Function(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """A function on offer. `parameters` is a JSON schema."""

    name: str
    description: str | None = None
    parameters: msgspec.Raw = ABSENT
    strict: Annotated[
        bool | None, refused("calls are not held to their schema by this version", neutral=(False,))
    ] = None


class FunctionTool(msgspec.Struct, forbid_unknown_fields=True):
    """A tool on offer."""

    function: Function
    type: Literal["function"] = "function"


class JsonSchema(msgspec.Struct, forbid_unknown_fields=True):
    """A schema that the answer matches; always strictly."""

    name: Annotated[str, passed_over("models are not shown it")]
    schema: msgspec.Raw = ABSENT
    description: Annotated[Any, passed_over("models are not shown it")] = None
    strict: Annotated[bool | None, honoured("answers match in any case")] = None


class FormatText(msgspec.Struct, tag="text", forbid_unknown_fields=True):
    """Any text."""


class FormatObject(msgspec.Struct, tag="json_object", forbid_unknown_fields=True):
    """Any JSON object."""


class FormatSchema(msgspec.Struct, tag="json_schema", forbid_unknown_fields=True):
    """What a schema allows."""

    json_schema: JsonSchema


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """How a stream is written."""

    include_usage: bool | None = None
    include_obfuscation: Annotated[
        Any, passed_over("hides lengths from who watches the network; nothing is added here")
    ] = None


class _Sampling(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    model: str = ""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    max_tokens: int | None = None
    n: Annotated[int | None, refused("one choice a request in this version", neutral=(1,))] = None
    user: Annotated[Any, passed_over("names an end user to OpenAI")] = None
    top_k: Annotated[int | None, honoured("not of OpenAI's: keep the k likeliest tokens")] = None
    min_p: Annotated[float | None, honoured("not of OpenAI's: as mlxd's own")] = None
    repetition_penalty: Annotated[float | None, honoured("not of OpenAI's: as mlxd's own")] = None


class ChatRequest(_Sampling, kw_only=True):
    """POST /v1/chat/completions."""

    messages: list[Developer | System | User | Assistant | Tool]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    response_format: FormatText | FormatObject | FormatSchema | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: Annotated[
        Any, refused("auto and none alone in this version", neutral=("auto", "none"))
    ] = None
    parallel_tool_calls: Annotated[
        bool | None, refused("models call as many as they like in this version", neutral=(True,))
    ] = None
    reasoning_effort: Annotated[
        str | None,
        honoured("a variable of the chat's template; none also sets enable_thinking to false"),
    ] = None
    chat_template_kwargs: Annotated[
        msgspec.Raw, honoured("not of OpenAI's: variables of the chat's template")
    ] = ABSENT
    audio: Annotated[Any, refused(NO_SOUND)] = None
    modalities: Annotated[list[str] | None, refused(NO_SOUND, neutral=(["text"],))] = None
    function_call: Annotated[
        Any, refused("the older form of tool_choice", neutral=("auto", "none"))
    ] = None
    functions: Annotated[Any, refused("the older form of tools", neutral=([],))] = None
    moderation: Annotated[Any, refused("nothing here moderates")] = None
    verbosity: Annotated[
        str | None, refused("no model here has such a dial", neutral=("medium",))
    ] = None
    web_search_options: Annotated[Any, refused("nothing here searches the web")] = None
    metadata: Annotated[Any, passed_over(OF_ACCOUNT)] = None
    prediction: Annotated[Any, passed_over("changes the speed alone")] = None
    prompt_cache_key: Annotated[Any, passed_over("prefixes are kept by themselves")] = None
    prompt_cache_options: Annotated[Any, passed_over("prefixes are kept by themselves")] = None
    prompt_cache_retention: Annotated[Any, passed_over("prefixes are kept by themselves")] = None
    safety_identifier: Annotated[Any, passed_over("names an end user to OpenAI")] = None
    service_tier: Annotated[Any, passed_over(OF_ACCOUNT)] = None
    store: Annotated[bool | None, refused("nothing is stored", neutral=(False,))] = None


class CompletionRequest(_Sampling, kw_only=True):
    """POST /v1/completions."""

    prompt: Annotated[Prompts | None, honoured("one prompt a request")]
    logprobs: Annotated[int | None, honoured("with so many of the best tokens, 0 to 20")] = None
    best_of: Annotated[
        int | None, refused("one choice a request in this version", neutral=(1,))
    ] = None
    echo: Annotated[bool | None, refused("not in this version", neutral=(False,))] = None
    suffix: Annotated[str | None, refused("no model here fills in", neutral=("",))] = None


class EmbeddingRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/embeddings."""

    input: Annotated[Prompts, honoured("texts, not tokens")]
    model: str = ""
    dimensions: int | None = None
    encoding_format: Literal["float", "base64"] | None = None
    user: Annotated[Any, passed_over("names an end user to OpenAI")] = None
