"""Hermes, Qwen 2.5 and Qwen 3: a JSON object between <tool_call> and </tool_call>."""

from __future__ import annotations

import json

from mlxd_worker.chat.parsing.pieces import Called, CallSyntax, Tools, call_of


def _decode(body: str, _: Tools) -> list[Called] | None:
    try:
        call = call_of(json.loads(body))
    except (ValueError, RecursionError):
        return None
    return None if call is None else [call]


SYNTAX = CallSyntax("<tool_call>", "</tool_call>", _decode)
