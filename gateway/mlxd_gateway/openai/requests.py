"""The requests of OpenAI's API: each field once, with what becomes of it.

Beside OpenAI's own fields stand those that clients of other servers of this API send (`top_k`,
`chat_template_kwargs`, `reasoning_content`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias, Union

import msgspec
from msgspec import Raw

from mlxd_gateway.common.fates import (
    ABSENT,
    Foreign,
    Stops,
    foreign,
    honour,
    pass_over,
    turn_down,
)
from mlxd_gateway.common.images import URL_HELP, Linked
from mlxd_shared import config

NO_SOUND = "no model here speaks"
NO_SIGHT = "no model here hears, watches videos or reads files: text and images alone"
SIGHT_ALIKE = "a model sees every image alike"
OF_ACCOUNT = "concerns an account with OpenAI"
SENT_BACK = "part of an answer that is sent back"
FROM_PARSING = "what OpenAI's packages have read in an answer that is sent back"
FROM_LITELLM = "LiteLLM's own, part of an answer that is sent back"


class Text(msgspec.Struct, tag="text", forbid_unknown_fields=True):
    """A part of a message: text."""

    text: str
    prompt_cache_breakpoint: Annotated[Raw, pass_over("prefixes are kept by themselves")] = ABSENT


class Refusal(msgspec.Struct, tag="refusal", forbid_unknown_fields=True):
    """A part of an assistant's message: what it said instead of an answer."""

    refusal: str


class ImageUrl(Linked, forbid_unknown_fields=True):
    """An image, or where it is."""

    url: Annotated[str, honour(URL_HELP)]
    detail: Annotated[Raw, pass_over(SIGHT_ALIKE)] = ABSENT


class Image(msgspec.Struct, tag="image_url", forbid_unknown_fields=True):
    """A part of a user's or a tool's message: an image."""

    image_url: ImageUrl


class Audio(msgspec.Struct, tag="input_audio"):
    """A part of a message that is no text."""

    input_audio: Annotated[Any, turn_down(NO_SIGHT)]


class File(msgspec.Struct, tag="file"):
    """A part of a message that is no text."""

    file: Annotated[Any, turn_down(NO_SIGHT)]


Prompts = str | list[str | int | list[int]]
"""One text, several, or the same as token ids."""
Inputs = (
    str | Annotated[list[str | int | list[int]], msgspec.Meta(max_length=config.EMBED_TEXTS_MAX)]
)
if TYPE_CHECKING:
    Part: TypeAlias = Text | Refusal | Image | Audio | File | Foreign
else:
    Part = Union[
        (Text, Refusal, Image, Audio, File, *foreign(NO_SIGHT, "video_url", "audio_url", "video"))
    ]
Content = str | list[Part]


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
    parsed_arguments: Annotated[Raw, pass_over(FROM_PARSING)] = ABSENT


class Call(msgspec.Struct, forbid_unknown_fields=True):
    """A call that an assistant made."""

    id: str
    function: CalledFunction
    type: Literal["function"] = "function"
    index: Annotated[Raw, pass_over(SENT_BACK)] = ABSENT


class Assistant(_Message, tag="assistant", kw_only=True):
    """What the model said."""

    content: Content | None = None  # type: ignore[assignment]
    tool_calls: list[Call] | None = None
    reasoning_content: Annotated[str | None, honour("the reasoning before the content")] = None
    reasoning: Annotated[str | None, honour("another name of reasoning_content")] = None
    refusal: Annotated[Raw, pass_over(SENT_BACK)] = ABSENT
    annotations: Annotated[Raw, pass_over(SENT_BACK)] = ABSENT
    parsed: Annotated[Raw, pass_over(FROM_PARSING)] = ABSENT
    provider_specific_fields: Annotated[Raw, pass_over(FROM_LITELLM)] = ABSENT
    audio: Annotated[Any, turn_down(NO_SOUND)] = None
    function_call: Annotated[Any, turn_down("the older form of tool_calls")] = None


class Function(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """A function on offer. `parameters` is a JSON schema."""

    name: str
    description: str | None = None
    parameters: Raw = ABSENT
    strict: Annotated[bool | None, honour("arguments match the parameters")] = None


class FunctionTool(msgspec.Struct, forbid_unknown_fields=True):
    """A tool on offer."""

    function: Function
    type: Literal["function"] = "function"


class ChosenFunction(msgspec.Struct, forbid_unknown_fields=True):
    """The function that is called."""

    name: str


class ChosenTool(msgspec.Struct, tag="function", forbid_unknown_fields=True):
    """A tool that is called."""

    function: ChosenFunction


class AllowedTools(msgspec.Struct, tag="allowed_tools"):
    """Some of the tools on offer."""

    allowed_tools: Annotated[Any, turn_down("all tools on offer, or one of them")]


class ChosenCustom(msgspec.Struct, tag="custom"):
    """A tool of another kind that is called."""

    custom: Annotated[Any, turn_down("tools are functions here")]


class JsonSchema(msgspec.Struct, forbid_unknown_fields=True):
    """A schema that the answer matches; always strictly."""

    name: Annotated[str, pass_over("models are not shown it")]
    schema: Raw = ABSENT
    description: Annotated[Raw, pass_over("models are not shown it")] = ABSENT
    strict: Annotated[bool | None, honour("answers match in any case")] = None


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
        Raw, pass_over("hides lengths from who watches the network; nothing is added here")
    ] = ABSENT


class _Sampling(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    model: str = ""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: (
        Annotated[dict[str, float], msgspec.Meta(max_length=config.LOGIT_BIAS_MAX)] | None
    ) = None
    seed: int | None = None
    stop: str | Stops | None = None
    max_tokens: int | None = None
    n: int | None = None
    user: Annotated[Raw, pass_over("names an end user to OpenAI")] = ABSENT
    top_k: Annotated[int | None, honour("not of OpenAI's: keep the k likeliest tokens")] = None
    min_p: Annotated[float | None, honour("not of OpenAI's: as mlxd's own")] = None
    repetition_penalty: Annotated[float | None, honour("not of OpenAI's: as mlxd's own")] = None


class ChatRequest(_Sampling, kw_only=True):
    """POST /v1/chat/completions."""

    messages: Annotated[
        list[Developer | System | User | Assistant | Tool],
        msgspec.Meta(max_length=config.CHAT_MESSAGES_MAX),
    ]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    response_format: FormatText | FormatObject | FormatSchema | None = None
    tools: Annotated[list[FunctionTool], msgspec.Meta(max_length=config.CHAT_TOOLS_MAX)] | None = (
        None
    )
    tool_choice: (
        Literal["none", "auto", "required"] | ChosenTool | AllowedTools | ChosenCustom | None
    ) = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Annotated[
        str | None,
        honour("a variable of the chat's template; none also sets enable_thinking to false"),
    ] = None
    chat_template_kwargs: Annotated[
        Raw, honour("not of OpenAI's: variables of the chat's template")
    ] = ABSENT
    audio: Annotated[Any, turn_down(NO_SOUND)] = None
    modalities: Annotated[list[str] | None, turn_down(NO_SOUND, neutral=(["text"],))] = None
    function_call: Annotated[
        Any, turn_down("the older form of tool_choice", neutral=("auto", "none"))
    ] = None
    functions: Annotated[Any, turn_down("the older form of tools", neutral=([],))] = None
    moderation: Annotated[Any, turn_down("nothing here moderates")] = None
    verbosity: Annotated[
        str | None, turn_down("no model here has such a dial", neutral=("medium",))
    ] = None
    web_search_options: Annotated[Any, turn_down("nothing here searches the web")] = None
    metadata: Annotated[Raw, pass_over(OF_ACCOUNT)] = ABSENT
    prediction: Annotated[Raw, pass_over("changes the speed alone")] = ABSENT
    prompt_cache_key: Annotated[Raw, pass_over("prefixes are kept by themselves")] = ABSENT
    prompt_cache_options: Annotated[Raw, pass_over("prefixes are kept by themselves")] = ABSENT
    prompt_cache_retention: Annotated[Raw, pass_over("prefixes are kept by themselves")] = ABSENT
    safety_identifier: Annotated[Raw, pass_over("names an end user to OpenAI")] = ABSENT
    service_tier: Annotated[Raw, pass_over(OF_ACCOUNT)] = ABSENT
    store: Annotated[bool | None, turn_down("responses alone are kept", neutral=(False,))] = None


class CompletionRequest(_Sampling, kw_only=True):
    """POST /v1/completions."""

    prompt: Annotated[
        Prompts | None, honour(f"texts or lists of token ids, 1 to {config.COMPLETION_PROMPTS_MAX}")
    ]
    logprobs: Annotated[int | None, honour("with so many of the best tokens, 0 to 20")] = None
    best_of: Annotated[
        int | None, honour("the likeliest by token, of up to 16 a prompt; above n not with stream")
    ] = None
    echo: Annotated[
        bool | None, honour("with logprobs those of the prompt, too; one choice a prompt")
    ] = None
    suffix: Annotated[str | None, turn_down("no model here fills in", neutral=("",))] = None


class EmbeddingRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/embeddings."""

    input: Annotated[Inputs, honour("texts, not tokens")]
    model: str = ""
    dimensions: int | None = None
    encoding_format: Literal["float", "base64"] | None = None
    user: Annotated[Raw, pass_over("names an end user to OpenAI")] = ABSENT
