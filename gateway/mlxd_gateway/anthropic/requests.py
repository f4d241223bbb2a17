"""The requests of Anthropic's API: each field once, with what becomes of it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Raw

from mlxd_gateway.common.fates import ABSENT, Stops, honour, pass_over, turn_down
from mlxd_shared import config

NO_SIGHT = "no model here sees: text alone"
OF_CACHE = "prefixes are kept by themselves"
OF_SERVER = "tools run with the client, not here"
OF_ACCOUNT = "concerns an account with Anthropic"


class _Block(msgspec.Struct, tag_field="type", forbid_unknown_fields=True, kw_only=True):
    cache_control: Annotated[Raw, pass_over(OF_CACHE)] = ABSENT


class Text(_Block, tag="text"):
    """Text."""

    text: str
    citations: Annotated[Raw, pass_over("models are not shown them")] = ABSENT


class Thinking(_Block, tag="thinking"):
    """What the model thought before it answered."""

    thinking: str
    signature: Annotated[str, pass_over("nothing here is signed")] = ""


class RedactedThinking(_Block, tag="redacted_thinking"):
    """What another service's model thought, which nobody else can read."""

    data: Annotated[str, pass_over("only who wrote it can read it")]


class ToolUse(_Block, tag="tool_use"):
    """A call of a tool."""

    id: str
    name: str
    input: Raw
    caller: Annotated[Raw, pass_over("models are not shown it")] = ABSENT
    toolset_name: Annotated[str | None, turn_down(OF_SERVER)] = None


class Image(_Block, tag="image", forbid_unknown_fields=False):
    """An image."""

    source: Annotated[Any, turn_down(NO_SIGHT)]


class Document(_Block, tag="document", forbid_unknown_fields=False):
    """A document."""

    source: Annotated[Any, turn_down(NO_SIGHT)]


class ToolResult(_Block, tag="tool_result"):
    """What a tool answers."""

    tool_use_id: str
    content: str | list[Text | Image | Document] | None = None
    is_error: Annotated[bool, pass_over("the content says it")] = False
    toolset_name: Annotated[str | None, turn_down(OF_SERVER)] = None


class _Message(msgspec.Struct, tag_field="role", forbid_unknown_fields=True):
    pass


class User(_Message, tag="user"):
    """What the user, or a tool, says."""

    content: str | list[Text | ToolResult | Image | Document]


class Assistant(_Message, tag="assistant"):
    """What the model said."""

    content: str | list[Text | Thinking | RedactedThinking | ToolUse]


class System(_Message, tag="system"):
    """What the application says in the middle."""

    content: str | list[Text]


class Tool(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A tool on offer."""

    name: str
    description: str | None = None
    input_schema: Raw = ABSENT
    type: Annotated[str | None, turn_down(OF_SERVER, neutral=("custom",))] = None
    strict: Annotated[bool | None, honour("arguments match the schema")] = None
    allowed_callers: Annotated[list[str] | None, turn_down(OF_SERVER, neutral=(["direct"],))] = None
    cache_control: Annotated[Raw, pass_over(OF_CACHE)] = ABSENT
    defer_loading: Annotated[bool | None, turn_down("every tool is shown", neutral=(False,))] = None
    eager_input_streaming: Annotated[Raw, pass_over("a call comes when it is whole")] = ABSENT
    input_examples: Annotated[Raw, pass_over("models are not shown them")] = ABSENT


class ToolChoice(msgspec.Struct, forbid_unknown_fields=True):
    """Who decides on calls."""

    type: Literal["auto", "none", "any", "tool"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingOn(msgspec.Struct, tag="enabled", tag_field="type", forbid_unknown_fields=True):
    """The model is to think."""

    budget_tokens: Annotated[int, pass_over("thinking has no bound of its own")]
    display: Annotated[Raw, pass_over("what a model thinks is shown")] = ABSENT


class ThinkingOff(msgspec.Struct, tag="disabled", tag_field="type", forbid_unknown_fields=True):
    """The model is not to think."""


class ThinkingFree(msgspec.Struct, tag="adaptive", tag_field="type", forbid_unknown_fields=True):
    """The model thinks as it likes."""

    display: Annotated[Raw, pass_over("what a model thinks is shown")] = ABSENT


class OutputFormat(msgspec.Struct, forbid_unknown_fields=True):
    """A schema that the answer matches."""

    schema: Raw
    type: Literal["json_schema"]


class OutputConfig(msgspec.Struct, forbid_unknown_fields=True):
    """How the answer is to be."""

    effort: Annotated[str | None, honour("reasoning_effort, a variable of the chat's template")] = (
        None
    )
    format: OutputFormat | None = None
    task_budget: Annotated[Raw, pass_over("models are not shown it")] = ABSENT


class _Conversation(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    messages: Annotated[
        list[User | Assistant | System], msgspec.Meta(max_length=config.CHAT_MESSAGES_MAX)
    ]
    model: str = ""
    system: str | list[Text] | None = None
    tools: Annotated[list[Tool], msgspec.Meta(max_length=config.CHAT_TOOLS_MAX)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Annotated[
        ThinkingOn | ThinkingOff | ThinkingFree | None,
        honour("enable_thinking, a variable of the chat's template"),
    ] = None
    output_config: OutputConfig | None = None
    cache_control: Annotated[Raw, pass_over(OF_CACHE)] = ABSENT
    context_management: Annotated[Raw, pass_over("nothing is cut here")] = ABSENT
    speed: Annotated[str | None, turn_down("there is one speed", neutral=("standard",))] = None
    user_profile_id: Annotated[Raw, pass_over(OF_ACCOUNT)] = ABSENT
    workspace_id: Annotated[Raw, pass_over(OF_ACCOUNT)] = ABSENT


class MessageRequest(_Conversation, kw_only=True):
    """POST /v1/messages."""

    max_tokens: int
    stream: bool | None = None
    stop_sequences: Stops | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    metadata: Annotated[Raw, pass_over("names an end user to Anthropic")] = ABSENT
    service_tier: Annotated[Raw, pass_over(OF_ACCOUNT)] = ABSENT
    container: Annotated[Any, turn_down(OF_SERVER)] = None
    diagnostics: Annotated[Raw, pass_over(OF_ACCOUNT)] = ABSENT
    inference_geo: Annotated[Raw, pass_over(OF_ACCOUNT)] = ABSENT


class CountRequest(_Conversation, kw_only=True):
    """POST /v1/messages/count_tokens."""
