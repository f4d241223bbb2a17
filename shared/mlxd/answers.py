"""What a generation gives back: frozen values, no protobuf, times in seconds.

The fields mean what the .proto files say. A value that the server left out is None.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from mlxd_shared.domain.cache_reasons import CacheReason
from mlxd_shared.domain.chats import AnswerPart, ChatMessage, answer_of
from mlxd_shared.domain.requests import FinishReason


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token, its log-probability under the raw logits, and its own bytes, maybe no whole text."""

    token_id: int
    logprob: float
    text_bytes: bytes


@dataclass(frozen=True, slots=True)
class PositionLogprobs:
    """The log-probabilities at one position: the drawn token's, and the best ones, best first."""

    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...]


@dataclass(frozen=True, slots=True)
class PromptEcho:
    """A prompt as the model reads it; text and ids are empty unless `echo` was asked for."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[PositionLogprobs, ...] = ()
    """Of each of its tokens from the second on, where they were asked for."""


@dataclass(frozen=True, slots=True)
class Delta:
    """The next piece of a stream. `offset` is the index of the first of `token_ids`.

    `logprobs` has one entry for each of `token_ids` where they were asked for, else none.
    """

    offset: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[PositionLogprobs, ...] = ()
    parts: tuple[AnswerPart, ...] = ()
    """The pieces of a chat's answer; `text` is that of its text alone."""
    seed: int | None = None
    """On the first of a choice: its seed, with which a stream of it alone can be resumed."""
    choice: int = 0
    """Which of the request's choices it belongs to; `offset` counts that one's tokens."""
    prompt: PromptEcho | None = None
    """On the first of the first choice, where it was asked for."""
    prompt_tokens: int | None = None
    """On the first of the first choice: how many tokens the prompt has."""


@dataclass(frozen=True, slots=True)
class Calls:
    """The calls that one stream took: one, but where its client went on after a loss."""

    lost: int = 0
    """Those that broke off after something had come."""
    resumed_tokens: int = 0
    """What the client had before the last one began."""


@dataclass(frozen=True, slots=True)
class Usage:
    """What one choice of a request cost; the prompt's tokens are counted for the first one alone.

    Where it took several calls, durations and counts of events are those of the last one; tokens
    are all of the stream's.
    """

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    total_tokens: int
    queue_s: float
    load_s: float
    prompt_s: float
    completion_s: float
    seed: int
    migrations: int
    near_ties: int
    cache_reason: CacheReason | None = None
    """Why no more than `cached_tokens` was reused."""
    drafted_tokens: int = 0
    """Guesses that the model has judged."""
    accepted_draft_tokens: int = 0
    """Those that were right, and so are part of the output."""
    calls: Calls = field(default_factory=Calls)
    """The calls that it took."""

    @property
    def first_token_s(self) -> float:
        """From the request's arrival to its first token."""
        return self.queue_s + self.load_s + self.prompt_s

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens after the first, by the second; None for fewer than two tokens.

        Of a stream that was resumed, those of the last call. None where it moved to another worker:
        nobody knows how many of its tokens that one made.
        """
        tokens = self.completion_tokens - self.calls.resumed_tokens
        if tokens < 2 or self.completion_s <= 0 or self.migrations:
            return None
        return (tokens - 1) / self.completion_s


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of a choice: the last message of a stream that has one.

    `matched` is the stop string, or the id of the end-of-sequence or stop token.
    """

    reason: FinishReason
    matched: str | int | None
    usage: Usage
    request_id: str
    model_digest: str
    choice: int = 0
    """Which of the request's choices has ended."""


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole choice at once."""

    text: str
    token_ids: tuple[int, ...]
    finished: Finished
    logprobs: tuple[PositionLogprobs, ...] = ()
    message: ChatMessage | None = None
    """The message that a chat's answer adds to it; None if the output was not parsed."""
    prompt: PromptEcho | None = None
    """What was asked for of the prompt; the first choice has it."""

    @classmethod
    def of(cls, events: Iterable[Delta | Finished]) -> Completion:
        """Return what all events of one choice come to; the last of them is Finished."""
        *begun, finished = events
        assert isinstance(finished, Finished), "a stream that is not whole"
        deltas = [event for event in begun if isinstance(event, Delta)]
        text = "".join(delta.text for delta in deltas)
        token_ids = tuple(token for delta in deltas for token in delta.token_ids)
        positions = tuple(each for delta in deltas for each in delta.logprobs)
        parts = [part for delta in deltas for part in delta.parts]
        echo = next((delta.prompt for delta in deltas if delta.prompt is not None), None)
        message = answer_of(parts) if parts else None
        return cls(text, token_ids, finished, positions, message, echo)

    @classmethod
    def each_of(cls, events: Iterable[Delta | Finished]) -> tuple[Completion, ...]:
        """Return what a whole stream's events come to, choice by choice."""
        by_choice: dict[int, list[Delta | Finished]] = {}
        for event in events:
            by_choice.setdefault(event.choice, []).append(event)
        return tuple(cls.of(by_choice[choice]) for choice in sorted(by_choice))
