"""A response's events, in their order and numbered, and the whole that they come to."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest

from mlxd import (
    AnswerPart,
    Delta,
    Finished,
    FinishReason,
    PositionLogprobs,
    TokenLogprob,
    ToolCall,
    Usage,
)
from mlxd_gateway.common.failures import Failure, FailureKind
from mlxd_gateway.openai.responses.answers import ResponseWriter
from mlxd_gateway.openai.responses.heads import Head

Event = Delta | Finished
USAGE = Usage(
    prompt_tokens=5, cached_tokens=2, completion_tokens=6, total_tokens=11, queue_s=0.0, load_s=0.0,
    prompt_s=0.0, completion_s=0.0, seed=0, migrations=0, near_ties=0,
)  # fmt: skip
CALL = ToolCall("f", '{"a":1}', "c1")
WHOLE: list[Event] = [
    Delta(0, "", (1,)),
    Delta(1, "", (2,), parts=(AnswerPart(0, reasoning="h"),)),
    Delta(2, "", (3,), parts=(AnswerPart(0, reasoning="m"),)),
    Delta(3, "ok", (4,), parts=(AnswerPart(1, "ok"),)),
    Delta(4, "", (5, 6), parts=(AnswerPart(2, tool_call=CALL),)),
]
ADDED, DONE = "output_item.added", "output_item.done"
PART_ADDED, PART_DONE = "content_part.added", "content_part.done"
TEXT = [ADDED, PART_ADDED, "output_text.delta", "output_text.done", PART_DONE, DONE]
CALLED = [ADDED, "function_call_arguments.delta", "function_call_arguments.done", DONE]
THOUGHT = [
    ADDED, PART_ADDED, "reasoning_text.delta", "reasoning_text.delta", "reasoning_text.done",
    PART_DONE, DONE,
]  # fmt: skip
SUMMED = [
    ADDED, "reasoning_summary_part.added", "reasoning_summary_text.delta",
    "reasoning_summary_text.delta", "reasoning_summary_text.done", "reasoning_summary_part.done",
    DONE,
]  # fmt: skip


def end(reason: FinishReason = FinishReason.EOS) -> Finished:
    """Return the end of a generation."""
    return Finished(reason, None, USAGE, "r", "d")


def writer(*, as_summary: bool = False, kept: list[Any] | None = None) -> ResponseWriter:
    """Return a writer of a response; `kept` gets what is to be kept."""
    head = Head("u", 1, {"model": "m"}, as_summary=as_summary)
    return ResponseWriter(head, (kept if kept is not None else []).append)


def read(chunks: list[bytes]) -> list[dict[str, Any]]:
    """Return the events of a stream, each named as its type says."""
    events = []
    for chunk in chunks:
        name, data = chunk.decode().removesuffix("\n\n").split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def stream(*events: Event, as_summary: bool = False) -> list[dict[str, Any]]:
    """Return all events of a response's stream."""
    made = writer(as_summary=as_summary)
    return read([*made.begin(), *(chunk for event in events for chunk in made.write(event))])


def types(events: list[dict[str, Any]]) -> list[str]:
    """Return what events say they are."""
    return [event["type"].removeprefix("response.") for event in events]


@pytest.mark.parametrize(("as_summary", "thought"), [(False, THOUGHT), (True, SUMMED)])
def test_items_begin_grow_and_end_in_order(as_summary: bool, thought: list[str]) -> None:
    """Reasoning, text and a call: an item each, between the response's beginning and end."""
    events = stream(*WHOLE, end(), as_summary=as_summary)
    expected = ["created", "in_progress", *thought, *TEXT, *CALLED, "completed"]
    assert types(events) == expected
    counts = Counter(event["output_index"] for event in events if "output_index" in event)
    assert counts == {0: len(thought), 1: len(TEXT), 2: len(CALLED)}
    ids = {event["item_id"] for event in events if "item_id" in event}
    assert ids == {"rs_u_0", "msg_u_1", "fc_u_2"}
    added = [event["item"] for event in events if event["type"].endswith(ADDED)]
    assert [item.get("content", item.get("arguments")) for item in added] == [[], [], ""]
    assert {item["status"] for item in added} == {"in_progress"}
    whole = events[-1]["response"]
    done = [event["item"] for event in events if event["type"].endswith(DONE)]
    assert whole["output"] == done
    said = [{"type": "summary_text" if as_summary else "reasoning_text", "text": "hm"}]
    assert done[0]["summary" if as_summary else "content"] == said
    assert done[0]["content" if as_summary else "summary"] == []
    assert (done[2]["call_id"], done[2]["arguments"]) == ("c1", '{"a":1}')


def test_the_whole_is_what_a_stream_ends_with() -> None:
    """It is kept once, before anybody is told of it."""
    kept: list[Any] = []
    whole = writer(kept=kept).whole([*WHOLE, end()])
    assert kept == [whole]
    assert whole == stream(*WHOLE, end())[-1]["response"]
    assert (whole["id"], whole["status"], whole["created_at"]) == ("resp_u", "completed", 1)
    streamed: list[Any] = []
    made = writer(kept=streamed)
    for chunk in (chunk for event in (*WHOLE, end()) for chunk in made.write(event)):
        if b"response.completed" in chunk:
            assert streamed == [whole]


def test_usage_tells_reasoning_apart() -> None:
    """By what each piece holds; a mark without text counts with what came before it."""
    assert writer().whole([*WHOLE, end()])["usage"] == {
        "input_tokens": 5,
        "input_tokens_details": {"cached_tokens": 2, "cache_write_tokens": 0},
        "output_tokens": 6,
        "output_tokens_details": {"reasoning_tokens": 2},
        "total_tokens": 11,
    }
    thought = AnswerPart(0, reasoning="hmm")
    pieces: list[Event] = [
        Delta(0, "", (1,), parts=(thought,)),
        Delta(1, "", (2,)),
        Delta(2, "o", (3, 4, 5, 6), parts=(thought, AnswerPart(1, "o"))),
        Delta(6, "", (7,)),
        end(),
    ]
    usage = writer().whole(pieces)["usage"]
    assert usage["output_tokens_details"] == {"reasoning_tokens": 5}


@pytest.mark.parametrize("reason", [FinishReason.LENGTH, FinishReason.CONTEXT])
def test_an_answer_that_is_cut_is_incomplete(reason: FinishReason) -> None:
    """And so is its last item."""
    events = stream(*WHOLE[:4], end(reason))
    assert types(events)[-2:] == [DONE, "incomplete"]
    response = events[-1]["response"]
    assert response["status"] == "incomplete"
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert [item["status"] for item in response["output"]] == ["completed", "incomplete"]
    called = writer().whole([*WHOLE, end(reason)])
    assert called["output"][-1]["status"] == "completed"


def test_a_failure_ends_a_stream_with_what_has_come() -> None:
    """Its code is one of the API's, and it is not kept."""
    cases = [
        (FailureKind.BUSY, "rate_limit_exceeded"),
        (FailureKind.INVALID, "invalid_prompt"),
        (FailureKind.UNAVAILABLE, "server_error"),
    ]
    for kind, code in cases:
        kept: list[Any] = []
        made = writer(kept=kept)
        chunks = [*made.begin(), *(chunk for event in WHOLE[:4] for chunk in made.write(event))]
        last = read([*chunks, *made.fail(Failure(kind, "no", "input"))])[-1]
        assert last["type"] == "response.failed"
        response = last["response"]
        assert response["status"] == "failed"
        assert response["error"] == {"code": code, "message": "no", "param": "input"}
        assert [item["status"] for item in response["output"]] == ["completed", "incomplete"]
        assert kept == []


def position(text: str) -> PositionLogprobs:
    """Return the log-probabilities of one token."""
    token = TokenLogprob(1, -1.0, text.encode())
    return PositionLogprobs(token, (token,))


def test_logprobs_come_with_the_text_of_their_tokens() -> None:
    """A token without text waits for the next one's; those of reasoning are not text's."""
    events = stream(
        Delta(0, "", (1,), (position("h"),), parts=(AnswerPart(0, reasoning="h"),)),
        Delta(1, "", (2,), (position("</think>"),)),
        Delta(2, "", (3,), (position("\xc3"),)),
        Delta(3, "ä", (4,), (position("ä"),), parts=(AnswerPart(1, "ä"),)),
        Delta(4, "", (5,), (position("!"),)),
        end(),
    )
    deltas = [event for event in events if event["type"].endswith("output_text.delta")]
    tokens = [[token["token"] for token in delta["logprobs"]] for delta in deltas]
    assert tokens == [["ä"], ["!"]]
    part = events[-1]["response"]["output"][1]["content"][0]
    assert [token["token"] for token in part["logprobs"]] == ["ä", "!"]
    assert part["logprobs"][0]["top_logprobs"][0]["logprob"] == -1.0
    waiting = writer().whole(
        [Delta(0, "", (1,), (position("a"),)),
         Delta(1, "b", (2,), (position("b"),), parts=(AnswerPart(0, "b"),)), end()]
    )  # fmt: skip
    logprobs = waiting["output"][0]["content"][0]["logprobs"]
    assert [token["token"] for token in logprobs] == ["a", "b"]


def test_an_answer_of_nothing_is_complete() -> None:
    """Without an item."""
    assert writer().whole([end()])["output"] == []
    assert types(stream(end())) == ["created", "in_progress", "completed"]
