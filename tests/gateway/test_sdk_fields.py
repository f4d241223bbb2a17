"""Every field that the official packages can send has a fate here."""

from __future__ import annotations

import typing
from typing import Any

import msgspec
import ollama._types as ollama_types
import pytest
from anthropic import types as anthropic_types
from anthropic.types import message_count_tokens_params, message_create_params
from openai.types import chat as openai_chat
from openai.types import completion_create_params, embedding_create_params
from openai.types.chat import completion_create_params as chat_create_params

from mlxd_gateway.anthropic import requests as anthropic
from mlxd_gateway.common.fates import fates_of
from mlxd_gateway.ollama import requests as ollama
from mlxd_gateway.openai import requests as openai

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
    (message_create_params.MessageCreateParamsNonStreaming, anthropic.MessageRequest),
    (message_create_params.MessageCreateParamsStreaming, anthropic.MessageRequest),
    (message_count_tokens_params.MessageCountTokensParams, anthropic.CountRequest),
    (anthropic_types.TextBlockParam, anthropic.Text),
    (anthropic_types.ThinkingBlockParam, anthropic.Thinking),
    (anthropic_types.RedactedThinkingBlockParam, anthropic.RedactedThinking),
    (anthropic_types.ToolUseBlockParam, anthropic.ToolUse),
    (anthropic_types.ToolResultBlockParam, anthropic.ToolResult),
    (anthropic_types.ToolParam, anthropic.Tool),
    (anthropic_types.ToolChoiceToolParam, anthropic.ToolChoice),
    (anthropic_types.ThinkingConfigEnabledParam, anthropic.ThinkingOn),
    (anthropic_types.ThinkingConfigAdaptiveParam, anthropic.ThinkingFree),
    (anthropic_types.OutputConfigParam, anthropic.OutputConfig),
]
MODELS = [
    (ollama_types.ChatRequest, ollama.ChatRequest),
    (ollama_types.GenerateRequest, ollama.GenerateRequest),
    (ollama_types.EmbedRequest, ollama.EmbedRequest),
    (ollama_types.EmbeddingsRequest, ollama.OldEmbedRequest),
    (ollama_types.ShowRequest, ollama.ShowRequest),
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
