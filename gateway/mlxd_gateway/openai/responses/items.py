"""What a response's input is made of: items, each field once, with what becomes of it.

A model's answer is made of the same items, and so is what is kept of a conversation.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, TypeAlias, Union

import msgspec
from msgspec import Raw

from mlxd_gateway.common.fates import ABSENT, Foreign, foreign, honour, pass_over, turn_down
from mlxd_gateway.common.images import URL_HELP, Linked
from mlxd_gateway.openai.requests import NO_SIGHT, SENT_BACK, SIGHT_ALIKE, Refusal

NO_TOOLS = "tools run with the client, not here"
NO_CUSTOM = "tools are functions here"
UNSEEN = "models are not shown it"

NO_FILES = "files are not kept here: send the image itself"

_File = foreign(NO_SIGHT, "input_file", "input_audio", "input_video")
_OtherItem = (
    *foreign(
        NO_TOOLS,
        "file_search_call",
        "computer_call",
        "computer_call_output",
        "web_search_call",
        "tool_search_call",
        "tool_search_output",
        "additional_tools",
        "image_generation_call",
        "code_interpreter_call",
        "local_shell_call",
        "local_shell_call_output",
        "shell_call",
        "shell_call_output",
        "apply_patch_call",
        "apply_patch_call_output",
        "mcp_list_tools",
        "mcp_approval_request",
        "mcp_approval_response",
        "mcp_call",
        "program",
        "program_output",
    ),
    *foreign(NO_CUSTOM, "custom_tool_call", "custom_tool_call_output"),
    *foreign("nothing is compacted here", "compaction", "compaction_trigger"),
    *foreign("a request says it", "configuration_update"),
    *foreign("send the item, or previous_response_id", "item_reference"),
)


class InputText(msgspec.Struct, tag="input_text", forbid_unknown_fields=True):
    """A part of what is said to a model."""

    text: str
    prompt_cache_breakpoint: Annotated[Raw, pass_over("prefixes are kept by themselves")] = ABSENT


class InputImage(Linked, tag="input_image", forbid_unknown_fields=True):
    """A part of what is shown to a model."""

    link_field: ClassVar[str] = "image_url"
    image_url: Annotated[str | None, honour(URL_HELP)] = None
    file_id: Annotated[str | None, turn_down(NO_FILES)] = None
    detail: Annotated[Raw, pass_over(SIGHT_ALIKE)] = ABSENT
    prompt_cache_breakpoint: Annotated[Raw, pass_over("prefixes are kept by themselves")] = ABSENT


class OutputText(msgspec.Struct, tag="output_text", forbid_unknown_fields=True):
    """A part of what a model said."""

    text: str
    annotations: Annotated[Raw, pass_over(SENT_BACK)] = ABSENT
    logprobs: Annotated[Raw, pass_over(SENT_BACK)] = ABSENT


class ReasoningText(msgspec.Struct, tag="reasoning_text", forbid_unknown_fields=True):
    """A part of a model's reasoning."""

    text: str


class SummaryText(msgspec.Struct, tag="summary_text", forbid_unknown_fields=True):
    """A part of a summary of it."""

    text: str


class FunctionCall(
    msgspec.Struct, tag="function_call", forbid_unknown_fields=True, rename={"is_async": "async"}
):
    """A call that a model made; `arguments` is JSON."""

    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: Annotated[Raw, pass_over(SENT_BACK)] = ABSENT
    caller: Annotated[Raw, pass_over(UNSEEN)] = ABSENT
    namespace: Annotated[Raw, pass_over(UNSEEN)] = ABSENT
    is_async: Annotated[Raw, pass_over(UNSEEN)] = ABSENT


class Reasoning(msgspec.Struct, tag="reasoning", forbid_unknown_fields=True):
    """What a model thought before what follows."""

    summary: Annotated[list[SummaryText] | None, honour("where there is no content")] = None
    content: list[ReasoningText] | None = None
    id: str | None = None
    encrypted_content: Annotated[Raw, pass_over("only who wrote it can read it")] = ABSENT
    status: Annotated[Raw, pass_over(SENT_BACK)] = ABSENT


if TYPE_CHECKING:
    Part: TypeAlias = InputText | InputImage | OutputText | Refusal | Foreign
    ResultPart: TypeAlias = InputText | InputImage | Foreign
else:
    Part = Union[(InputText, InputImage, OutputText, Refusal, *_File)]
    ResultPart = Union[(InputText, InputImage, *_File)]


class Message(msgspec.Struct, tag="message", forbid_unknown_fields=True):
    """What somebody said. An item without a type is one."""

    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[Part]
    id: str | None = None
    status: Annotated[Raw, pass_over(SENT_BACK)] = ABSENT
    phase: Annotated[Raw, pass_over(UNSEEN)] = ABSENT


class FunctionCallOutput(msgspec.Struct, tag="function_call_output", forbid_unknown_fields=True):
    """What a function returned."""

    call_id: str
    output: str | list[ResultPart]
    name: str | None = None
    id: str | None = None
    status: Annotated[Raw, pass_over(SENT_BACK)] = ABSENT
    caller: Annotated[Raw, pass_over(UNSEEN)] = ABSENT
    namespace: Annotated[Raw, pass_over(UNSEEN)] = ABSENT


if TYPE_CHECKING:
    Item: TypeAlias = Message | Reasoning | FunctionCall | FunctionCallOutput | Foreign
else:
    Item = Union[(Message, Reasoning, FunctionCall, FunctionCallOutput, *_OtherItem)]
