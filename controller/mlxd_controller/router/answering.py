"""mlxd's messages as answers of `vllm.grpc.engine`. Pure.

Invariants:
- A stream is a chunk for each message with tokens, whose ids are new, and then one Complete for
  each choice, which repeats none. An answer that is no stream is the Completes alone, with all ids.
- Each choice ends with exactly one Complete, also if it is aborted.
- Completes without a stream come in the order of their choices, because SMG 1.13 numbers the
  choices of a whole answer as they arrive, whatever their `index`.
- Only the first choice knows what of the prompt was reused, and has the prompt's log-probabilities.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

from google.protobuf.message import Message
from smg_grpc_proto import vllm_engine_pb2 as pb

from mlxd.v1 import inference_pb2, types_pb2

ABORTED: Final = "abort"
FINISH: Final[Mapping[int, str]] = MappingProxyType(
    {
        types_pb2.FINISH_REASON_EOS: "stop",
        types_pb2.FINISH_REASON_STOP_STRING: "stop",
        types_pb2.FINISH_REASON_STOP_TOKEN: "stop",
        types_pb2.FINISH_REASON_LENGTH: "length",
        types_pb2.FINISH_REASON_CONTEXT: "length",
        types_pb2.FINISH_REASON_CANCELLED: ABORTED,
    }
)
"""What ends a choice, in their words."""


@dataclass(slots=True)
class _Choice:
    """What of a choice has come."""

    count: int = 0
    """Of its tokens."""
    is_over: bool = False
    ids: list[int] = field(default_factory=list)
    """Kept where nothing is streamed, with what belongs to each."""
    logprobs: list[inference_pb2.PositionLogprobs] = field(default_factory=list)
    prompt: Message | None = None


class Answers:
    """The answers to one GenerateRequest."""

    def __init__(self, *, streams: bool, choices: int, prompt_ids: Sequence[int]) -> None:
        """Begin; `prompt_ids` are empty where the prompt is a text."""
        self._streams = streams
        self._prompt_ids = prompt_ids
        self._prompt_tokens = len(prompt_ids)
        self._choices = [_Choice() for _ in range(choices)]
        self._held: dict[int, Message] = {}  # Completes that wait for an earlier choice's
        self._sent = 0  # Completes without a stream

    def of(self, frame: bytes) -> Iterator[Message]:
        """Yield what one message of mlxd's becomes."""
        message = inference_pb2.GenerateResponse.FromString(frame)
        choice = self._choices[message.choice]
        choice.count += len(message.token_ids)
        self._prompt_tokens = message.prompt_tokens or self._prompt_tokens
        if message.HasField("prompt"):
            choice.prompt = _prompt_logprobs(message.prompt, self._prompt_ids)
        if self._streams:
            if message.token_ids or choice.prompt is not None:
                yield pb.GenerateResponse(chunk=self._chunk(message, choice))
                choice.prompt = None
        else:
            choice.ids.extend(message.token_ids)
            choice.logprobs.extend(message.logprobs)
        if message.HasField("finish"):
            reason = FINISH.get(message.finish.reason, "error")
            complete = self._complete(message.choice, reason)
            _add_end(complete, message)
            yield from self._end(message.choice, complete)

    def end_aborted(self) -> Iterator[Message]:
        """Yield the ends of the choices that have not ended."""
        for index, choice in enumerate(self._choices):
            if not choice.is_over:
                yield from self._end(index, self._complete(index, ABORTED))

    def _end(self, index: int, complete: Message) -> Iterator[Message]:
        if self._streams:
            yield pb.GenerateResponse(complete=complete)
            return
        self._held[index] = complete
        while self._sent in self._held:
            yield pb.GenerateResponse(complete=self._held.pop(self._sent))
            self._sent += 1

    def _chunk(self, message: inference_pb2.GenerateResponse, choice: _Choice) -> Message:
        made: Message = pb.GenerateStreamChunk(
            token_ids=message.token_ids,
            prompt_tokens=self._prompt_tokens,
            completion_tokens=len(message.token_ids),
            index=message.choice,
            output_logprobs=_output_logprobs(message.logprobs),
            input_logprobs=choice.prompt,
        )
        return made

    def _complete(self, index: int, reason: str) -> Any:  # noqa: ANN401
        choice = self._choices[index]
        choice.is_over = True
        return pb.GenerateComplete(
            output_ids=choice.ids,
            finish_reason=reason,
            prompt_tokens=self._prompt_tokens,
            completion_tokens=choice.count,
            output_logprobs=_output_logprobs(choice.logprobs),
            input_logprobs=choice.prompt,
            index=index,
        )


def _add_end(complete: Any, message: inference_pb2.GenerateResponse) -> None:  # noqa: ANN401
    """Add what only the last message of a choice tells."""
    usage = message.usage
    complete.cached_tokens = usage.cached_tokens
    complete.spec_draft_tokens = usage.drafted_tokens
    complete.spec_accepted_tokens = usage.accepted_draft_tokens
    finish = message.finish
    if finish.reason == types_pb2.FINISH_REASON_STOP_STRING:
        complete.matched_stop_str = finish.stop_string
    elif finish.reason == types_pb2.FINISH_REASON_STOP_TOKEN:
        complete.matched_token_id = finish.stop_token_id


def _output_logprobs(positions: Sequence[inference_pb2.PositionLogprobs]) -> Message | None:
    if not positions:
        return None
    made: Message = pb.OutputLogProbs(
        token_logprobs=[each.chosen.logprob for each in positions],
        token_ids=[each.chosen.token_id for each in positions],
        top_logprobs=[_top(each.top) for each in positions],
    )
    return made


def _prompt_logprobs(echo: inference_pb2.PromptEcho, prompt_ids: Sequence[int]) -> Message:
    """Return those of a prompt's tokens; its first one has none, as nothing comes before it.

    The first id is known of a prompt of ids; of a text the list begins with the second token.
    """
    first, positions = list(prompt_ids[:1]), echo.logprobs
    made: Message = pb.InputLogProbs(
        token_logprobs=[
            *(pb.InputTokenLogProb() for _ in first),
            *(pb.InputTokenLogProb(value=each.chosen.logprob) for each in positions),
        ],
        token_ids=[*first, *(each.chosen.token_id for each in positions)],
        top_logprobs=[
            *(pb.TopLogProbs() for _ in first),
            *(_top(each.top) for each in positions),
        ],
    )
    return made


def _top(best: Iterable[inference_pb2.TokenLogprob]) -> Message:
    tokens = list(best)
    made: Message = pb.TopLogProbs(
        values=[each.logprob for each in tokens], token_ids=[each.token_id for each in tokens]
    )
    return made
