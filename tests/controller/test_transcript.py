"""What an operator who asked for contents finds in the log of a chat."""

from __future__ import annotations

import pytest
from structlog.testing import capture_logs

from mlxd.v1 import inference_pb2 as pb
from mlxd_controller.services.transcript import Transcript
from mlxd_shared import config

CHAT = pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content="hi")])


@pytest.mark.parametrize("wanted", [True, False])
def test_a_chat_is_logged_whole_or_not_at_all(*, wanted: bool) -> None:
    """The conversation, and everything of the answer: reasoning and calls too."""
    transcript = Transcript(wanted=wanted)
    call = pb.ToolCall(name="f", arguments_json="{}")
    parts = [
        pb.OutputPart(reasoning="hm"),
        pb.OutputPart(index=1, text="ok"),
        pb.OutputPart(index=2, tool_call=call),
    ]
    with capture_logs() as logged, transcript.of(pb.GenerateRequest(chat=CHAT)):
        transcript.saw_frame(pb.GenerateResponse(text="ok", parts=parts).SerializeToString())

    assert bool(logged) is wanted
    if wanted:
        assert '"content":"hi"' in logged[0]["prompt"].replace(" ", "")
        assert logged[0]["output"] == "hmokf({})"


def test_what_a_chat_logs_is_bounded() -> None:
    """However long the conversation."""
    chat = pb.ChatPrompt(messages=[pb.ChatMessage(content="x" * config.LOGGED_CHARS_MAX * 2)])
    with capture_logs() as logged, Transcript(wanted=True).of(pb.GenerateRequest(chat=chat)):
        pass
    assert len(logged[0]["prompt"]) == config.LOGGED_CHARS_MAX


@pytest.mark.parametrize("frame_chars", [7, 1000, 3 * config.LOGGED_CHARS_MAX])
def test_what_an_answer_logs_is_bounded(frame_chars: int) -> None:
    """However long the answer, and in whatever pieces it comes: its beginning, no more than may be;
    what comes after that is not even parsed."""
    text = "".join(chr(ord("a") + i % 26) for i in range(3 * config.LOGGED_CHARS_MAX))
    transcript = Transcript(wanted=True)
    with capture_logs() as logged, transcript.of(pb.GenerateRequest(text="p")):
        for begin in range(0, 2 * config.LOGGED_CHARS_MAX, frame_chars):
            piece = text[begin : begin + frame_chars]
            transcript.saw_frame(pb.GenerateResponse(text=piece).SerializeToString())
        transcript.saw_frame(b"no message")
    assert logged[0]["output"] == text[: config.LOGGED_CHARS_MAX]
