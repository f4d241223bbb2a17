"""LiteLLM, which is told to fetch nothing: its prices are those of its package."""

from __future__ import annotations

import json
import os
from typing import Any

from tests.sdks import ANSWER_TOKENS, MODEL, QUESTION, RESULT, TOOL, gateway_url, report


def main() -> None:
    """Chat."""
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # read at the import
    import litellm  # noqa: PLC0415

    common: dict[str, Any] = {
        "model": f"openai/{MODEL}",
        "api_base": f"{gateway_url()}/v1",
        "api_key": "none",
        "temperature": 0,
        "max_retries": 0,
    }
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    first = litellm.completion(
        messages=messages,
        tools=[TOOL],
        tool_choice="required",
        parallel_tool_calls=False,
        **common,
    )
    message = first.choices[0].message
    (call,) = message.tool_calls
    messages += [message, {"role": "tool", "tool_call_id": call.id, "content": RESULT}]
    pieces = litellm.completion(messages=messages, max_tokens=ANSWER_TOKENS, stream=True, **common)
    answer = "".join(piece.choices[0].delta.content or "" for piece in pieces)
    report(call.function.name, json.loads(call.function.arguments), answer)


if __name__ == "__main__":
    main()
