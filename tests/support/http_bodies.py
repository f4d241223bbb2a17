"""Good bodies for each path of the gateway, and bodies that are nearly good."""

from __future__ import annotations

import json
import random
from typing import Any

from tests.support.json_mutants import mutant

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "model": "demo",
        "messages": [
            {"role": "system", "content": [{"type": "text", "text": "a"}]},
            {"role": "user", "content": "b"},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "a", "content": "c"},
        ],
        "tools": [TOOL],
        "stop": ["x"],
        "logit_bias": {"1": 2},
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {}}},
        "chat_template_kwargs": {"a": 1},
        "reasoning_effort": "low",
        "temperature": 0.5,
        "seed": 1,
        "max_tokens": 4,
        "stream": True,
        "stream_options": {"include_usage": True},
    },
    "/v1/responses": {
        "model": "demo",
        "instructions": "a",
        "input": [
            {"role": "user", "content": "b"},
            {"type": "reasoning", "id": "r", "summary": [], "content": [
                {"type": "reasoning_text", "text": "c"},
            ]},
            {"type": "message", "role": "assistant", "content": [
                {"type": "output_text", "text": "d", "annotations": []},
            ]},
            {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "a", "output": "e"},
        ],
        "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}}],
        "tool_choice": "auto",
        "text": {"format": {"type": "json_schema", "name": "n", "schema": {}}},
        "reasoning": {"effort": "low", "summary": "auto"},
        "include": ["message.output_text.logprobs"],
        "metadata": {"a": "b"},
        "max_output_tokens": 4,
    },
    "/v1/completions": {"model": "demo", "prompt": [1, 2], "max_tokens": 3, "logprobs": 1},
    "/v1/embeddings": {
        "model": "demo", "input": ["a", "b"], "encoding_format": "base64",
        "dimensions": 8,
    },
    "/v1/messages": {
        "model": "demo",
        "max_tokens": 4,
        "system": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "b"}]},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "t", "signature": ""},
                {"type": "tool_use", "id": "a", "name": "f", "input": {}},
            ]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "a", "content": "c"},
            ]},
        ],
        "tools": [{"name": "f", "input_schema": {"type": "object"}}],
        "tool_choice": {"type": "auto"},
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "output_config": {"format": {"type": "json_schema", "schema": {}}},
    },
    "/v1/messages/count_tokens": {"model": "demo", "messages": [{"role": "user", "content": "a"}]},
    "/api/chat": {
        "model": "demo",
        "messages": [{"role": "user", "content": "a"}],
        "tools": [TOOL],
        "options": {"num_predict": 3, "stop": ["x"], "temperature": 0.1, "repeat_last_n": 4},
        "format": {"type": "object"},
        "keep_alive": "5m",
        "think": True,
        "stream": False,
    },
    "/api/generate": {"model": "demo", "prompt": "a", "keep_alive": -1, "format": "json"},
    "/api/embed": {"model": "demo", "input": "a"},
    "/api/show": {"model": "demo"},
    "/api/pull": {"model": "o/m", "stream": False, "insecure": False},
    "/v1/rerank": {"model": "demo", "query": "a", "documents": ["b", {"text": "c"}], "top_n": 1},
    "/v2/rerank": {"model": "demo", "query": "a", "documents": ["b"], "max_tokens_per_doc": 9},
}  # fmt: skip


def mutate(path: str, rng: random.Random) -> bytes:
    """Return a body that is nearly good: another value, a byte more or less, or half of it."""
    body = json.dumps(mutant(BODIES[path], rng)).encode()
    place = rng.randrange(len(body))
    match rng.randrange(8):
        case 0:
            return body[:place]
        case 1:
            return body[:place] + bytes([rng.randrange(256)]) + body[place:]
        case _:
            return body
