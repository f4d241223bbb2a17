"""Every field that the official packages can send has a fate here."""

from __future__ import annotations

import typing
from typing import Any

import msgspec
import ollama._types as ollama_types
import pytest
from anthropic import types as anthropic_types
from anthropic.types import (
    message_count_tokens_params,
    message_create_params,
    tool_result_block_param,
)
from openai.types import chat as openai_chat
from openai.types import completion_create_params, embedding_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import (
    easy_input_message_param,
    function_tool_param,
    input_item_list_params,
    response_create_params,
    response_format_text_config_param,
    response_format_text_json_schema_config_param,
    response_function_call_output_item_param,
    response_function_tool_call_param,
    response_input_content_param,
    response_input_image_content_param,
    response_input_image_param,
    response_input_item_param,
    response_input_text_content_param,
    response_input_text_param,
    response_output_message_param,
    response_output_refusal_param,
    response_output_text_param,
    response_reasoning_item_param,
    response_retrieve_params,
    response_text_config_param,
    tool_choice_function_param,
    tool_param,
)
from openai.types.shared_params import reasoning as reasoning_param

from mlxd_gateway.anthropic import requests as anthropic
from mlxd_gateway.common.fates import fates_of
from mlxd_gateway.ollama import requests as ollama
from mlxd_gateway.openai import requests as openai
from mlxd_gateway.openai.responses import items
from mlxd_gateway.openai.responses import requests as responses

TYPED = [
    (chat_create_params.CompletionCreateParamsNonStreaming, openai.ChatRequest),
    (chat_create_params.CompletionCreateParamsStreaming, openai.ChatRequest),
    (completion_create_params.CompletionCreateParamsNonStreaming, openai.CompletionRequest),
    (completion_create_params.CompletionCreateParamsStreaming, openai.CompletionRequest),
    (embedding_create_params.EmbeddingCreateParams, openai.EmbeddingRequest),
    (openai_chat.ChatCompletionDeveloperMessageParam, openai.Developer),
    (openai_chat.ChatCompletionSystemMessageParam, openai.System),
    (openai_chat.ChatCompletionUserMessageParam, openai.User),
    (openai_chat.ChatCompletionAssistantMessageParam, openai.Assistant),
    (openai_chat.ChatCompletionToolMessageParam, openai.Tool),
    (openai_chat.ChatCompletionContentPartTextParam, openai.Text),
    (openai_chat.ChatCompletionContentPartRefusalParam, openai.Refusal),
    (openai_chat.ChatCompletionFunctionToolParam, openai.FunctionTool),
    (openai_chat.ChatCompletionMessageFunctionToolCallParam, openai.Call),
    (openai_chat.ChatCompletionStreamOptionsParam, openai.StreamOptions),
    (response_create_params.ResponseCreateParamsNonStreaming, responses.ResponseRequest),
    (response_create_params.ResponseCreateParamsStreaming, responses.ResponseRequest),
    (response_create_params.StreamOptions, responses.StreamOptions),
    (response_retrieve_params.ResponseRetrieveParamsNonStreaming, responses.RetrieveQuery),
    (response_retrieve_params.ResponseRetrieveParamsStreaming, responses.RetrieveQuery),
    (input_item_list_params.InputItemListParams, responses.InputItemsQuery),
    (easy_input_message_param.EasyInputMessageParam, items.Message),
    (response_input_item_param.Message, items.Message),
    (response_output_message_param.ResponseOutputMessageParam, items.Message),
    (response_input_item_param.FunctionCallOutput, items.FunctionCallOutput),
    (response_function_tool_call_param.ResponseFunctionToolCallParam, items.FunctionCall),
    (response_reasoning_item_param.ResponseReasoningItemParam, items.Reasoning),
    (response_reasoning_item_param.Content, items.ReasoningText),
    (response_reasoning_item_param.Summary, items.SummaryText),
    (response_input_text_param.ResponseInputTextParam, items.InputText),
    (response_input_text_content_param.ResponseInputTextContentParam, items.InputText),
    (response_input_image_param.ResponseInputImageParam, items.InputImage),
    (response_input_image_content_param.ResponseInputImageContentParam, items.InputImage),
    (response_output_text_param.ResponseOutputTextParam, items.OutputText),
    (response_output_refusal_param.ResponseOutputRefusalParam, openai.Refusal),
    (function_tool_param.FunctionToolParam, responses.FunctionTool),
    (tool_choice_function_param.ToolChoiceFunctionParam, responses.ChosenFunction),
    (response_text_config_param.ResponseTextConfigParam, responses.TextConfig),
    (
        response_format_text_json_schema_config_param.ResponseFormatTextJSONSchemaConfigParam,
        responses.FormatSchema,
    ),
    (reasoning_param.Reasoning, responses.ReasoningConfig),
    (message_create_params.MessageCreateParamsNonStreaming, anthropic.MessageRequest),
    (message_create_params.MessageCreateParamsStreaming, anthropic.MessageRequest),
    (message_count_tokens_params.MessageCountTokensParams, anthropic.CountRequest),
    (anthropic_types.TextBlockParam, anthropic.Text),
    (anthropic_types.ThinkingBlockParam, anthropic.Thinking),
    (anthropic_types.RedactedThinkingBlockParam, anthropic.RedactedThinking),
    (anthropic_types.ToolUseBlockParam, anthropic.ToolUse),
    (anthropic_types.ToolResultBlockParam, anthropic.ToolResult),
    (anthropic_types.ToolParam, anthropic.Tool),
    *((kind, anthropic.Tool) for kind in typing.get_args(anthropic_types.ToolUnionParam)),
    *(
        (kind, anthropic.Tool)
        for kind in typing.get_args(anthropic_types.MessageCountTokensToolParam)
    ),
    *((kind, anthropic.ToolChoice) for kind in typing.get_args(anthropic_types.ToolChoiceParam)),
    (anthropic_types.UserMessageParam, anthropic.User),
    (anthropic_types.AssistantMessageParam, anthropic.Assistant),
    (anthropic_types.SystemMessageParam, anthropic.System),
    (anthropic_types.ThinkingConfigEnabledParam, anthropic.ThinkingOn),
    (anthropic_types.ThinkingConfigAdaptiveParam, anthropic.ThinkingFree),
    (anthropic_types.ThinkingConfigDisabledParam, anthropic.ThinkingOff),
    (anthropic_types.OutputConfigParam, anthropic.OutputConfig),
    (anthropic_types.JSONOutputFormatParam, anthropic.OutputFormat),
]
TYPES = [
    (response_input_item_param.ResponseInputItemParam, items.Item),
    (response_input_content_param.ResponseInputContentParam, items.Part),
    (response_output_message_param.Content, items.Part),
    (
        response_function_call_output_item_param.ResponseFunctionCallOutputItemParam,
        items.ResultPart,
    ),
    (tool_param.ToolParam, responses.Tool),
    (response_create_params.ToolChoice, responses.Choice),
    (
        response_format_text_config_param.ResponseFormatTextConfigParam,
        typing.get_type_hints(responses.TextConfig)["format"],
    ),
    (anthropic_types.ContentBlockParam, anthropic.UserBlock),
    (anthropic_types.ContentBlockParam, anthropic.AssistantBlock),
    (tool_result_block_param.Content, anthropic.ResultBlock),
    (anthropic_types.ThinkingConfigParam, anthropic.ThinkingConfig),
]
MODELS = [
    (ollama_types.ChatRequest, ollama.ChatRequest),
    (ollama_types.GenerateRequest, ollama.GenerateRequest),
    (ollama_types.EmbedRequest, ollama.EmbedRequest),
    (ollama_types.EmbeddingsRequest, ollama.OldEmbedRequest),
    (ollama_types.ShowRequest, ollama.ShowRequest),
    (ollama_types.PullRequest, ollama.PullRequest),
    (ollama_types.Options, ollama.Options),
    (ollama_types.Message, ollama.Message),
]


def known_fields(kind: type[msgspec.Struct]) -> set[str]:
    """Return the fields that a struct reads, the one that tells it from others included."""
    tag = kind.__struct_config__.tag_field
    return set(fates_of(kind)) | ({tag} if tag else set())


@pytest.mark.parametrize(("theirs", "ours"), TYPED)
def test_no_field_of_a_package_is_missing(theirs: Any, ours: type[msgspec.Struct]) -> None:
    """OpenAI's and Anthropic's packages: each field is honoured, passed over or refused."""
    assert set(typing.get_type_hints(theirs)) - known_fields(ours) == set()


@pytest.mark.parametrize(("theirs", "ours"), MODELS)
def test_no_field_of_ollamas_package_is_missing(theirs: Any, ours: type[msgspec.Struct]) -> None:
    """Ollama's package, whose requests are models of pydantic."""
    assert set(theirs.model_fields) - known_fields(ours) == set()


def literals_in(hint: Any) -> set[str]:
    """Return the texts that an annotation allows, at any depth."""
    if typing.get_origin(hint) is typing.Literal:
        return set(typing.get_args(hint))
    return {text for inner in typing.get_args(hint) for text in literals_in(inner)}


@pytest.mark.parametrize(("theirs", "ours"), TYPES)
def test_no_type_of_a_package_is_missing(theirs: Any, ours: Any) -> None:
    """Each kind of item, part, tool and choice is read, or refused with a reason."""
    dicts = [each for each in typing.get_args(theirs) if isinstance(each, type)]
    wanted = {text for each in dicts for text in literals_in(typing.get_type_hints(each)["type"])}
    structs = [each for each in typing.get_args(ours) if each is not type(None)]
    assert wanted
    assert wanted - {each.__struct_config__.tag for each in structs} == set()
