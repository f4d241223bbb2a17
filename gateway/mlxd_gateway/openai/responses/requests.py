"""The requests of OpenAI's Responses API: each field once, with what becomes of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias, Union

import msgspec
from msgspec import Raw

from mlxd_gateway.common.fates import ABSENT, Foreign, foreign, honour, pass_over, turn_down
from mlxd_gateway.openai.requests import NO_SIGHT, OF_ACCOUNT, FormatObject, FormatText
from mlxd_gateway.openai.responses.items import NO_CUSTOM, NO_TOOLS, UNSEEN, Item
from mlxd_shared import config

LOGPROBS = "message.output_text.logprobs"
KEPT_BY_ITSELF = "prefixes are kept by themselves"
NO_BACKGROUND = "nothing runs in the background"
KEPT_WHOLE = "what is kept comes whole"

_OtherTool = (
    *foreign(
        NO_TOOLS,
        "file_search",
        "computer",
        "computer_use_preview",
        "web_search",
        "web_search_2025_08_26",
        "web_search_preview",
        "web_search_preview_2025_03_11",
        "mcp",
        "code_interpreter",
        "programmatic_tool_calling",
        "image_generation",
        "local_shell",
        "shell",
        "apply_patch",
        "tool_search",
    ),
    *foreign(NO_CUSTOM, "custom", "namespace"),
)
_OtherChoice = (
    *foreign(
        NO_TOOLS,
        "file_search",
        "computer",
        "computer_use",
        "computer_use_preview",
        "web_search_preview",
        "web_search_preview_2025_03_11",
        "image_generation",
        "code_interpreter",
        "mcp",
        "programmatic_tool_calling",
        "apply_patch",
        "shell",
    ),
    *foreign(NO_CUSTOM, "custom"),
    *foreign("all tools on offer, or one of them", "allowed_tools"),
)


class FunctionTool(
    msgspec.Struct,
    tag="function",
    forbid_unknown_fields=True,
    omit_defaults=True,
    rename={"is_async": "async"},
):
    """A function on offer. `parameters` is a JSON schema."""

    name: str
    description: str | None = None
    parameters: Raw = ABSENT
    strict: Annotated[
        bool | None, honour("true: arguments match the parameters; false unless it is said")
    ] = None
    output_schema: Annotated[Raw, pass_over(UNSEEN)] = ABSENT
    allowed_callers: Annotated[
        list[str] | None, turn_down("models alone call", neutral=(["direct"],))
    ] = None
    defer_loading: Annotated[bool | None, turn_down("every tool is shown", neutral=(False,))] = None
    is_async: Annotated[bool | None, turn_down("a call is awaited", neutral=(False,))] = None


class ChosenFunction(msgspec.Struct, tag="function", forbid_unknown_fields=True):
    """The function that is called."""

    name: str


if TYPE_CHECKING:
    Tool: TypeAlias = FunctionTool | Foreign
    Choice: TypeAlias = ChosenFunction | Foreign
else:
    Tool = Union[(FunctionTool, *_OtherTool)]
    Choice = Union[(ChosenFunction, *_OtherChoice)]


class FormatSchema(
    msgspec.Struct, tag="json_schema", forbid_unknown_fields=True, omit_defaults=True
):
    """What a schema allows; always strictly."""

    name: Annotated[str, honour("comes back with the response; models are not shown it")]
    schema: Raw = ABSENT
    description: Annotated[Raw, pass_over(UNSEEN)] = ABSENT
    strict: Annotated[bool | None, honour("answers match in any case")] = None


class TextConfig(msgspec.Struct, forbid_unknown_fields=True):
    """What the text is like."""

    format: FormatText | FormatObject | FormatSchema | None = None
    verbosity: Annotated[
        str | None, turn_down("no model here has such a dial", neutral=("medium",))
    ] = None


class ReasoningConfig(msgspec.Struct, forbid_unknown_fields=True):
    """How a model thinks before it speaks, and what is shown of that."""

    effort: Annotated[
        str | None,
        honour("a variable of the chat's template; none also sets enable_thinking to false"),
    ] = None
    summary: Annotated[
        Literal["auto", "concise", "detailed"] | None,
        honour("the reasoning itself comes as the summary, whole, instead of as content"),
    ] = None
    generate_summary: Annotated[
        Literal["auto", "concise", "detailed"] | None, honour("the older name of summary")
    ] = None
    context: Annotated[str | None, turn_down("the chat's template decides", neutral=("auto",))] = (
        None
    )
    mode: Annotated[str | None, turn_down("there is one mode", neutral=("standard",))] = None


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """How a stream is written."""

    include_obfuscation: Annotated[
        Raw, pass_over("hides lengths from who watches the network; nothing is added here")
    ] = ABSENT


class ResponseRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/responses."""

    input: str | Annotated[list[Item], msgspec.Meta(max_length=config.HTTP_ITEMS_MAX)]
    model: str = ""
    instructions: str | None = None
    previous_response_id: str | None = None
    store: Annotated[bool | None, honour("for a while: true unless it is said")] = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    tools: Annotated[list[Tool], msgspec.Meta(max_length=config.CHAT_TOOLS_MAX)] | None = None
    tool_choice: Literal["none", "auto", "required"] | Choice | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = None
    include: Annotated[
        list[
            Literal[
                "message.output_text.logprobs",
                "reasoning.encrypted_content",
                "message.input_image.image_url",
                "file_search_call.results",
                "web_search_call.results",
                "web_search_call.action.sources",
                "computer_call_output.output.image_url",
                "code_interpreter_call.outputs",
            ]
        ]
        | None,
        honour(f"{LOGPROBS}; what the others name never occurs here"),
    ] = None
    metadata: Annotated[dict[str, str] | None, honour("comes back with the response")] = None
    client_metadata: Annotated[Raw, pass_over("Codex's own: who runs it")] = ABSENT
    top_k: Annotated[int | None, honour("not of OpenAI's: keep the k likeliest tokens")] = None
    min_p: Annotated[float | None, honour("not of OpenAI's: as mlxd's own")] = None
    repetition_penalty: Annotated[float | None, honour("not of OpenAI's: as mlxd's own")] = None
    seed: Annotated[int | None, honour("not of OpenAI's: as mlxd's own")] = None
    chat_template_kwargs: Annotated[
        Raw, honour("not of OpenAI's: variables of the chat's template")
    ] = ABSENT
    background: Annotated[bool | None, turn_down(NO_BACKGROUND, neutral=(False,))] = None
    background_options: Annotated[Any, turn_down(NO_BACKGROUND, neutral=({},))] = None
    conversation: Annotated[Any, turn_down("send input, or previous_response_id")] = None
    prompt: Annotated[Any, turn_down("no prompts are kept here")] = None
    moderation: Annotated[Any, turn_down("nothing here moderates")] = None
    truncation: Annotated[str | None, turn_down("no prompt is cut", neutral=("disabled",))] = None
    max_tool_calls: Annotated[Raw, pass_over("bounds tools that run with a server")] = ABSENT
    context_management: Annotated[Raw, pass_over("nothing is cut here")] = ABSENT
    image: Annotated[Raw, pass_over(NO_SIGHT)] = ABSENT
    prompt_cache_key: Annotated[Raw, pass_over(KEPT_BY_ITSELF)] = ABSENT
    prompt_cache_options: Annotated[Raw, pass_over(KEPT_BY_ITSELF)] = ABSENT
    prompt_cache_retention: Annotated[Raw, pass_over(KEPT_BY_ITSELF)] = ABSENT
    safety_identifier: Annotated[Raw, pass_over("names an end user to OpenAI")] = ABSENT
    user: Annotated[Raw, pass_over("names an end user to OpenAI")] = ABSENT
    service_tier: Annotated[Raw, pass_over(OF_ACCOUNT)] = ABSENT
    access_programs: Annotated[Raw, pass_over(OF_ACCOUNT)] = ABSENT


class RetrieveQuery(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """GET /v1/responses/ID."""

    stream: Annotated[bool | None, turn_down(KEPT_WHOLE, neutral=(False,))] = None
    starting_after: Annotated[Any, turn_down(KEPT_WHOLE)] = None
    include: Annotated[Raw, pass_over("as it was when the response was made")] = ABSENT
    include_obfuscation: Annotated[Raw, pass_over("there is no stream")] = ABSENT


class InputItemsQuery(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """GET /v1/responses/ID/input_items."""

    after: str | None = None
    limit: Annotated[int | None, honour("1 to 100; 20 unless it is said")] = None
    order: Annotated[Literal["asc", "desc"] | None, honour("desc unless it is said")] = None
    include: Annotated[Raw, pass_over("as it was when the response was made")] = ABSENT
