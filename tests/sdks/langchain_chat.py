"""LangChain."""

from __future__ import annotations

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI

from tests.sdks import ANSWER_TOKENS, MODEL, QUESTION, RESULT, TOOL, gateway_url, report


def main() -> None:
    """Chat."""
    model = ChatOpenAI(
        model=MODEL, base_url=f"{gateway_url()}/v1", api_key="none", temperature=0, max_retries=0
    )
    asking = model.bind_tools([TOOL], tool_choice="required", parallel_tool_calls=False)
    question = HumanMessage(QUESTION)
    called = asking.invoke([question])
    (call,) = called.tool_calls
    result = ToolMessage(RESULT, tool_call_id=call["id"])
    answering = model.bind(max_tokens=ANSWER_TOKENS)
    answer = "".join(piece.text for piece in answering.stream([question, called, result]))
    report(call["name"], call["args"], answer)


if __name__ == "__main__":
    main()
