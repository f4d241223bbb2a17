"""LlamaIndex, whose adapter for OpenAI's API is LiteLLM's: its own needs an older `openai`."""

from __future__ import annotations

import os
from typing import Any

from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool, ToolMetadata

from tests.sdks import ANSWER_TOKENS, MODEL, QUESTION, RESULT, TOOL, gateway_url, report


class StrictMetadata(ToolMetadata):  # type: ignore[misc]  # an untyped package
    """A tool whose calls are held to a schema, of which LlamaIndex's own drops a part."""

    def to_openai_tool(self, *, skip_length_check: bool = False) -> dict[str, Any]:
        """Return the tool as OpenAI's API has it."""
        return TOOL


def weather(city: str) -> str:
    """Tell the weather."""
    return RESULT if city else ""


def main() -> None:
    """Chat."""
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # read at the import
    from llama_index.llms.litellm import LiteLLM  # noqa: PLC0415

    model = LiteLLM(
        model=f"openai/{MODEL}",
        api_base=f"{gateway_url()}/v1",
        api_key="none",
        temperature=0,
        max_retries=0,
    )
    metadata = StrictMetadata(name="weather", description="Tells it.")
    question = ChatMessage(role="user", content=QUESTION)
    first = model.chat_with_tools(
        [FunctionTool(fn=weather, metadata=metadata)],
        chat_history=[question],
        tool_required=True,
        allow_parallel_tool_calls=False,
    )
    (call,) = model.get_tool_calls_from_response(first)
    result = ChatMessage(
        role="tool",
        content=weather(**call.tool_kwargs),
        additional_kwargs={"tool_call_id": call.tool_id},
    )
    answer = model.chat([question, first.message, result], max_tokens=ANSWER_TOKENS)
    report(call.tool_name, call.tool_kwargs, answer.message.content)


if __name__ == "__main__":
    main()
