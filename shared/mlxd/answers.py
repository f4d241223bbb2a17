"""What a generation returns: frozen values, no protobuf, times in seconds.

The .proto files define the fields. A value that the server left out is None.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from mlxd_shared.domain.cache_reasons import CacheReason
from mlxd_shared.domain.chats import AnswerPart, ChatMessage, answer_of
from mlxd_shared.domain.requests import FinishReason


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token, its log-probability under the raw logits, and its bytes, maybe half a character."""

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
    """A prompt as the model reads it; text and ids are empty without `echo`."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[PositionLogprobs, ...] = ()
    """For each of its tokens from the second on, if requested."""


@dataclass(frozen=True, slots=True)
class Delta:
    """The next piece of a stream. `offset` is the index of the first of `token_ids`.

    `logprobs` has one entry for each of `token_ids` if requested, otherwise none.
    """

    offset: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[PositionLogprobs, ...] = ()
    parts: tuple[AnswerPart, ...] = ()
    """The pieces of a chat's answer; `text` is that of its text alone."""
    seed: int | None = None
    """On the first of a choice: its seed, with which a single-choice stream can be resumed."""
    choice: int = 0
    """The choice that it belongs to; `offset` counts that choice's tokens."""
    prompt: PromptEcho | None = None
    """On the first of the first choice, if requested."""
    prompt_tokens: int | None = None
    """On the first of the first choice: how many tokens the prompt has."""


@dataclass(frozen=True, slots=True)
class Calls:
    """The calls that one stream took: more than one if its client resumed it after a loss."""

    lost: int = 0
    """Those that broke off after something had arrived."""
    resumed_tokens: int = 0
    """How many tokens the client had before the last call began."""


@dataclass(frozen=True, slots=True)
class Usage:
    """The usage of one choice of a request; only the first one counts the prompt's tokens.

    If it took several calls, durations and event counts are those of the last call; tokens are all
    of the stream's.
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
    """Those that were right, and are part of the output."""
    calls: Calls = field(default_factory=Calls)
    """The calls that it took."""

    @property
    def first_token_s(self) -> float:
        """From the request's arrival to its first token."""
        return self.queue_s + self.load_s + self.prompt_s

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens after the first per second; None for fewer than two tokens.

        For a resumed stream, those of the last call. None if it moved to another worker, because
        then it is unknown how many tokens that one made.
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
    """The choice that has ended."""


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole choice at once."""

    text: str
    token_ids: tuple[int, ...]
    finished: Finished
    logprobs: tuple[PositionLogprobs, ...] = ()
    message: ChatMessage | None = None
    """The message to append to the chat; None if the output was not parsed."""
    prompt: PromptEcho | None = None
    """What was requested about the prompt; only on the first choice."""

    @classmethod
    def of(cls, events: Iterable[Delta | Finished]) -> Completion:
        """Return the completion of one choice's events; the last of them is Finished."""
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
        """Return the completions of a whole stream's events, choice by choice."""
        by_choice: dict[int, list[Delta | Finished]] = {}
        for event in events:
            by_choice.setdefault(event.choice, []).append(event)
        return tuple(cls.of(by_choice[choice]) for choice in sorted(by_choice))
