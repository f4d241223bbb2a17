"""OpenAI's chunks of several choices, and what they cost together."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mlxd import (
    AnswerPart,
    Completion,
    Delta,
    Finished,
    FinishReason,
    PositionLogprobs,
    PromptEcho,
    TokenLogprob,
    ToolCall,
    Usage,
)
from mlxd_gateway.openai import answers as a

HEAD = a.Head("id", "m", created=1)


def usage_of(prompt_tokens: int, completion_tokens: int) -> Usage:
    """Return what a choice cost."""
    return Usage(
        prompt_tokens=prompt_tokens, cached_tokens=0, completion_tokens=completion_tokens,
        total_tokens=prompt_tokens + completion_tokens, queue_s=0.0, load_s=0.0, prompt_s=0.0,
        completion_s=0.0, seed=0, migrations=0, near_ties=0,
    )  # fmt: skip


def end_of(choice: int) -> Finished:
    """Return the end of a choice; the first has the prompt's tokens."""
    return Finished(FinishReason.EOS, None, usage_of(0 if choice else 5, 2), "r", "d", choice)


def read(chunks: list[bytes]) -> list[Any]:
    """Return what events of a stream hold, but for the last one's mark."""
    return [json.loads(chunk.removeprefix(b"data: ")) for chunk in chunks if chunk != a.DONE]


def write(writer: a.ChatWriter | a.CompletionWriter, *events: Delta | Finished) -> list[bytes]:
    """Return all chunks of a stream."""
    return [*writer.begin(), *(chunk for event in events for chunk in writer.write(event))]


def test_chunks_of_a_chat_name_their_choice() -> None:
    """Roles, texts, calls and ends each; usage and the last mark come behind the last end."""
    call = ToolCall("f", "{}", "c")
    chunks = write(
        a.ChatWriter(HEAD, usage=True, choices=2),
        Delta(0, "a", (1,), parts=(AnswerPart(0, "a"),), choice=1),
        Delta(0, "", (1,), parts=(AnswerPart(0, tool_call=call),), choice=0),
        end_of(1),
        end_of(0),
    )
    assert chunks[-1] == a.DONE
    assert chunks.count(a.DONE) == 1
    *said, cost = read(chunks)
    choices = [chunk["choices"][0] for chunk in said]
    assert [choice["index"] for choice in choices] == [0, 1, 1, 0, 1, 0]
    assert choices[3]["delta"]["tool_calls"][0]["index"] == 0
    assert [choice["finish_reason"] for choice in choices[4:]] == ["stop", "tool_calls"]
    assert (cost["usage"]["prompt_tokens"], cost["usage"]["completion_tokens"]) == (5, 4)


def test_chunks_of_completions_name_their_choice() -> None:
    """And so do those of plain texts."""
    chunks = write(
        a.CompletionWriter(HEAD, usage=False, choices=2),
        Delta(0, "a", (1,), choice=0),
        Delta(0, "b", (1,), choice=1),
        end_of(0),
        end_of(1),
    )
    choices = [chunk["choices"][0] for chunk in read(chunks)]
    assert [(choice["index"], choice["text"]) for choice in choices] == [
        (0, "a"),
        (1, "b"),
        (0, ""),
        (1, ""),
    ]
    assert chunks[-1] == a.DONE


@pytest.mark.parametrize("whole", [a.whole_chat, a.whole_completion])
def test_whole_answers_hold_all_choices(whole: Any) -> None:
    """In their order, with what all of them cost."""
    answer = whole(HEAD, [Completion(text, (1,), end_of(i)) for i, text in enumerate("ab")])
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert answer["usage"]["total_tokens"] == 9


def test_an_echoed_prompt_stands_before_the_text() -> None:
    """With its tokens' log-probabilities, of which the first has none, and their places."""
    prompt = PromptEcho("ab", (1, 2), (position("b", -1.0),))
    delta = Delta(0, "c", (3,), (position("c", -2.0),), prompt=prompt)
    whole = a.whole_completion(HEAD, [Completion.of([delta, end_of(0)])])["choices"][0]

    assert whole["text"] == "abc"
    assert whole["logprobs"]["tokens"] == ["a", "b", "c"]
    assert whole["logprobs"]["token_logprobs"] == [None, -1.0, -2.0]
    assert whole["logprobs"]["text_offset"] == [0, 1, 2]
    first, second, _ = read(write(a.CompletionWriter(HEAD, usage=False), delta, end_of(0)))
    assert [chunk["choices"][0]["text"] for chunk in (first, second)] == ["ab", "c"]
    assert first["choices"][0]["logprobs"]["text_offset"] == [0, 1]
    assert second["choices"][0]["logprobs"]["text_offset"] == [2]


def position(text: str, logprob: float) -> PositionLogprobs:
    """Return the log-probabilities of one token."""
    return PositionLogprobs(TokenLogprob(1, logprob, text.encode()), ())
