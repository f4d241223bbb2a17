"""The requests of Anthropic's API: each field once, with what becomes of it."""

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

NO_SIGHT = "no model here hears, watches videos or reads documents: text and images alone"
OF_CACHE = "prefixes are kept by themselves"
OF_SERVER = "tools run with the client, not here"
OF_ACCOUNT = "concerns an account with Anthropic"
OF_USER = "belongs in a user's message"
OF_ASSISTANT = "belongs in an assistant's message"
_OfServer = foreign(
    OF_SERVER, "server_tool_use", "web_search_tool_result", "web_fetch_tool_result",
    "code_execution_tool_result", "bash_code_execution_tool_result",
    "text_editor_code_execution_tool_result", "tool_search_tool_result", "container_upload",
)  # fmt: skip
_SearchResult = foreign("send it as text", "search_result")
_Heard = foreign(NO_SIGHT, "video", "audio")


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


class Base64(msgspec.Struct, tag="base64", tag_field="type", forbid_unknown_fields=True):
    """An image's bytes."""

    media_type: str
    data: str


class Url(Linked, tag="url", tag_field="type", forbid_unknown_fields=True):
    """Where an image is."""

    url: Annotated[str, honour(URL_HELP)]


if TYPE_CHECKING:
    ImageSource: TypeAlias = Base64 | Url | Foreign
else:
    ImageSource = Union[(Base64, Url, *foreign("files are not kept here", "file"))]


class Image(_Block, tag="image"):
    """An image."""

    source: ImageSource
    title: Annotated[Raw, pass_over("models are not shown it")] = ABSENT


class Document(_Block, tag="document", forbid_unknown_fields=False):
    """A document."""

    source: Annotated[Any, turn_down(NO_SIGHT)]


if TYPE_CHECKING:
    ResultBlock: TypeAlias = Text | Image | Document | Foreign
else:
    ResultBlock = Union[
        (
            Text, Image, Document, *_SearchResult, *_Heard,
            *foreign(OF_SERVER, "tool_reference", "browser_state"),
        )
    ]  # fmt: skip


class ToolResult(_Block, tag="tool_result"):
    """What a tool answers."""

    tool_use_id: str
    content: str | list[ResultBlock] | None = None
    is_error: Annotated[bool, pass_over("the content says it")] = False
    toolset_name: Annotated[str | None, turn_down(OF_SERVER)] = None


if TYPE_CHECKING:
    UserBlock: TypeAlias = Text | ToolResult | Image | Document | Foreign
    AssistantBlock: TypeAlias = Text | Thinking | RedactedThinking | ToolUse | Foreign
else:
    UserBlock = Union[
        (
            Text, ToolResult, Image, Document, *_SearchResult, *_OfServer, *_Heard,
            *foreign(OF_ASSISTANT, "thinking", "redacted_thinking", "tool_use"),
        )
    ]  # fmt: skip
    AssistantBlock = Union[
        (
            Text, Thinking, RedactedThinking, ToolUse, *_OfServer,
            *foreign(OF_USER, "image", "document", "search_result", "tool_result"),
        )
    ]  # fmt: skip


class _Message(msgspec.Struct, tag_field="role", forbid_unknown_fields=True):
    pass


class User(_Message, tag="user"):
    """What the user, or a tool, says."""

    content: str | list[UserBlock]


class Assistant(_Message, tag="assistant"):
    """What the model said."""

    content: str | list[AssistantBlock]


class System(_Message, tag="system"):
    """What the application says in the middle."""

    content: str | list[Text]


class Tool(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A tool on offer. Another type than custom is one of Anthropic's own, with its options."""

    type: Annotated[str | None, turn_down(OF_SERVER, neutral=("custom",))] = None
    name: str = ""
    description: str | None = None
    input_schema: Raw = ABSENT
    strict: Annotated[bool | None, honour("arguments match the schema")] = None
    allowed_callers: Annotated[list[str] | None, turn_down(OF_SERVER, neutral=(["direct"],))] = None
    cache_control: Annotated[Raw, pass_over(OF_CACHE)] = ABSENT
    defer_loading: Annotated[bool | None, turn_down("every tool is shown", neutral=(False,))] = None
    eager_input_streaming: Annotated[Raw, pass_over("a call comes when it is whole")] = ABSENT
    input_examples: Annotated[Raw, pass_over("models are not shown them")] = ABSENT
    allowed_domains: Annotated[Any, turn_down(OF_SERVER)] = None
    blocked_domains: Annotated[Any, turn_down(OF_SERVER)] = None
    citations: Annotated[Any, turn_down(OF_SERVER)] = None
    configs: Annotated[Any, turn_down(OF_SERVER)] = None
    max_characters: Annotated[Any, turn_down(OF_SERVER)] = None
    max_content_tokens: Annotated[Any, turn_down(OF_SERVER)] = None
    max_uses: Annotated[Any, turn_down(OF_SERVER)] = None
    response_inclusion: Annotated[Any, turn_down(OF_SERVER)] = None
    url_sources: Annotated[Any, turn_down(OF_SERVER)] = None
    use_cache: Annotated[Any, turn_down(OF_SERVER)] = None
    user_location: Annotated[Any, turn_down(OF_SERVER)] = None


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


if TYPE_CHECKING:
    ThinkingConfig: TypeAlias = ThinkingOn | ThinkingOff | ThinkingFree | Foreign
else:
    ThinkingConfig = Union[
        (
            ThinkingOn, ThinkingOff, ThinkingFree,
            *foreign("a chat's template decides where its model thinks", "between_tools"),
        )
    ]  # fmt: skip


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
        ThinkingConfig | None,
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
