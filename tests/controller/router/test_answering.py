"""mlxd's messages as a router reads them: chunks with new tokens, one end for each choice."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from mlxd.v1 import inference_pb2, types_pb2
from mlxd_controller.router.answering import Answers

Response = inference_pb2.GenerateResponse
PROMPT = (11, 12, 13)


def position(token_id: int) -> inference_pb2.PositionLogprobs:
    """A token with its logarithm, and the best beside it."""
    token = inference_pb2.TokenLogprob(token_id=token_id, logprob=-token_id)
    best = inference_pb2.TokenLogprob(token_id=0, logprob=-0.5)
    return inference_pb2.PositionLogprobs(chosen=token, top=[best])


def stream(*, choice: int = 0, reason: Any = types_pb2.FINISH_REASON_LENGTH) -> list[bytes]:
    """Two messages of a choice with three tokens."""
    first = Response(
        token_ids=[1, 2],
        logprobs=[position(1), position(2)],
        choice=choice,
        prompt_tokens=0 if choice else 3,
    )
    usage = types_pb2.Usage(
        cached_tokens=0 if choice else 2, drafted_tokens=4, accepted_draft_tokens=1
    )
    last = Response(
        token_ids=[3],
        logprobs=[position(3)],
        choice=choice,
        finish=types_pb2.Finish(reason=reason),
        usage=usage,
    )
    return [first.SerializeToString(), last.SerializeToString()]


def answers(frames: Iterable[bytes], *, streams: bool, choices: int = 1) -> list[Any]:
    """All answers to these messages."""
    making = Answers(streams=streams, choices=choices, prompt_ids=PROMPT)
    return [answer for frame in frames for answer in making.of(frame)]


def test_a_stream_is_chunks_of_new_tokens_and_an_end_without_any() -> None:
    """No id comes twice; the end has the counts."""
    first, second, end = answers(stream(), streams=True)

    assert (list(first.chunk.token_ids), list(second.chunk.token_ids)) == ([1, 2], [3])
    assert (first.chunk.completion_tokens, second.chunk.completion_tokens) == (2, 1)
    assert first.chunk.prompt_tokens == len(PROMPT)
    assert list(first.chunk.output_logprobs.token_ids) == [1, 2]
    assert list(first.chunk.output_logprobs.token_logprobs) == [-1.0, -2.0]
    assert list(first.chunk.output_logprobs.top_logprobs[0].values) == [-0.5]
    complete = end.complete
    assert not complete.output_ids
    assert not complete.HasField("output_logprobs")
    assert (complete.prompt_tokens, complete.completion_tokens, complete.cached_tokens) == (3, 3, 2)
    assert (complete.spec_draft_tokens, complete.spec_accepted_tokens) == (4, 1)
    assert complete.finish_reason == "length"


def test_what_is_no_stream_comes_whole() -> None:
    """All ids and their log-probabilities, once."""
    (end,) = answers(stream(), streams=False)

    assert list(end.complete.output_ids) == [1, 2, 3]
    assert list(end.complete.output_logprobs.token_ids) == [1, 2, 3]
    assert end.complete.completion_tokens == 3


@pytest.mark.parametrize("streams", [True, False])
def test_choices_are_told_apart(*, streams: bool) -> None:
    """Each has its own tokens and end, under its number, and the prompt's length."""
    frames = [frame for pair in zip(stream(), stream(choice=1), strict=True) for frame in pair]
    made = answers(frames, streams=streams, choices=2)
    ends = [each.complete for each in made if each.HasField("complete")]

    assert sorted(end.index for end in ends) == [0, 1]
    assert all((end.completion_tokens, end.prompt_tokens) == (3, 3) for end in ends)
    chunks = [each.chunk for each in made if each.HasField("chunk")]
    assert [chunk.index for chunk in chunks] == ([0, 1, 0, 1] if streams else [])


REASONS = [
    (types_pb2.FINISH_REASON_EOS, "stop"),
    (types_pb2.FINISH_REASON_STOP_STRING, "stop"),
    (types_pb2.FINISH_REASON_STOP_TOKEN, "stop"),
    (types_pb2.FINISH_REASON_LENGTH, "length"),
    (types_pb2.FINISH_REASON_CONTEXT, "length"),
    (types_pb2.FINISH_REASON_CANCELLED, "abort"),
    (99, "error"),
]


@pytest.mark.parametrize(("reason", "word"), REASONS)
def test_every_end_has_a_word_of_theirs(reason: Any, word: str) -> None:
    """Also one of a later version."""
    *_, end = answers(stream(reason=reason), streams=True)
    assert end.complete.finish_reason == word


def test_what_ended_a_stream_is_named() -> None:
    """A stop string and a stop token; the end of a sequence is neither."""
    text = types_pb2.Finish(reason=types_pb2.FINISH_REASON_STOP_STRING, stop_string="dog")
    token = types_pb2.Finish(reason=types_pb2.FINISH_REASON_STOP_TOKEN, stop_token_id=7)
    eos = types_pb2.Finish(reason=types_pb2.FINISH_REASON_EOS, stop_token_id=2)
    frames = [Response(finish=finish) for finish in (text, token, eos)]
    ends = [answers([each.SerializeToString()], streams=True)[0].complete for each in frames]

    assert [end.WhichOneof("matched_stop") for end in ends] == [
        "matched_stop_str", "matched_token_id", None,
    ]  # fmt: skip
    assert (ends[0].matched_stop_str, ends[1].matched_token_id) == ("dog", 7)


@pytest.mark.parametrize("streams", [True, False])
def test_a_prompt_s_first_token_has_no_probability(*, streams: bool) -> None:
    """The others have theirs; they come once, with the first answer of the first choice."""
    echo = inference_pb2.PromptEcho(logprobs=[position(12), position(13)])
    begin = Response(prompt=echo, prompt_tokens=3).SerializeToString()
    first, *others = answers([begin, *stream()], streams=streams)
    prompt = (first.chunk if streams else first.complete).input_logprobs

    assert list(prompt.token_ids) == [11, 12, 13]
    assert [each.HasField("value") for each in prompt.token_logprobs] == [False, True, True]
    assert [len(each.values) for each in prompt.top_logprobs] == [0, 1, 1]
    assert not any(each.chunk.HasField("input_logprobs") for each in others)
    assert not any(each.complete.HasField("input_logprobs") for each in others)


def test_a_whole_answer_has_its_choices_in_order() -> None:
    """A router numbers them as they come, so the one that ends first waits for those before it."""
    making = Answers(streams=False, choices=3, prompt_ids=PROMPT)
    last: list[Any] = [each for frame in stream(choice=2) for each in making.of(frame)]
    first: list[Any] = [each for frame in stream(choice=0) for each in making.of(frame)]
    rest: list[Any] = list(making.end_aborted())

    assert last == []
    assert [each.complete.index for each in first] == [0]
    ends = [(each.complete.index, each.complete.finish_reason) for each in rest]
    assert ends == [(1, "abort"), (2, "length")]
    assert list(rest[1].complete.output_ids) == [1, 2, 3]


def test_an_abort_ends_what_has_not_ended() -> None:
    """The choice that is over has its end already; the other gets one, with what it has."""
    making = Answers(streams=False, choices=2, prompt_ids=PROMPT)
    for frame in (*stream(), stream(choice=1)[0]):
        list(making.of(frame))
    ends: list[Any] = list(making.end_aborted())
    complete = ends[0].complete

    assert len(ends) == 1
    assert (complete.index, complete.finish_reason) == (1, "abort")
    assert list(complete.output_ids) == [1, 2]
