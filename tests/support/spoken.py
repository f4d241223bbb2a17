"""What a scripted controller says to a chat: reasoning, text, a call of a tool, and the end."""

from __future__ import annotations

from mlxd.v1 import inference_pb2, types_pb2
from tests.fakes.replies import DIGEST, last

CALL_ID = "abc123def"
ARGUMENTS = '{"city": "Bern"}'


def answer_with_call() -> list[inference_pb2.GenerateResponse]:
    """A stream whose answer is reasoning, text and one call."""
    call = inference_pb2.ToolCall(id=CALL_ID, name="weather", arguments_json=ARGUMENTS)
    part = inference_pb2.OutputPart
    response = inference_pb2.GenerateResponse
    return [
        response(
            offset=0, request_id="r", model_digest=DIGEST, token_ids=[1],
            parts=[part(index=0, reasoning="hm")],
        ),
        response(offset=1, token_ids=[2], parts=[part(index=0, reasoning="m")]),
        response(
            offset=2, token_ids=[3], text="Let me see.", parts=[part(index=1, text="Let me see.")]
        ),
        response(offset=3, token_ids=[4, 5], parts=[part(index=2, tool_call=call)]),
        last(5, finish=types_pb2.Finish(reason=types_pb2.FINISH_REASON_EOS)),
    ]  # fmt: skip


def answer_with_text(text: str = "It rains.") -> list[inference_pb2.GenerateResponse]:
    """A stream whose answer is text."""
    parts = [inference_pb2.OutputPart(index=0, text=text)]
    first = inference_pb2.GenerateResponse(
        offset=0, request_id="r", model_digest=DIGEST, token_ids=[1], text=text, parts=parts
    )
    return [first, last(1, finish=types_pb2.Finish(reason=types_pb2.FINISH_REASON_EOS))]
