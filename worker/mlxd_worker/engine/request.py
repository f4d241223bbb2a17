"""The engine's messages: what goes into its mailbox and what comes out of a stream's sink.

Invariants:
- Messages are frozen and hold plain Python values, never an array, so they may cross threads.
- A stream's events come in order: Tokens (offsets without a gap), then exactly one Finished or
  Failed. A stream that was cancelled gets nothing more.
- A sink never blocks: the engine waits for no client.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NewType

from mlxd_shared.domain.cache_reasons import CacheReason
from mlxd_shared.domain.errors import MlxdError
from mlxd_shared.domain.requests import FinishReason, Pooling, Sampling
from mlxd_worker.engine.masks.advance import Grammar
from mlxd_worker.engine.masks.calls import CallConstraint

StreamId = NewType("StreamId", int)
"""Names a stream within one engine; never used twice."""


@dataclass(frozen=True, slots=True)
class Usage:
    """What one stream cost, as the engine knows it; durations in seconds."""

    prompt_tokens: int
    cached_tokens: int
    """The part of the prompt whose state was reused."""
    cache_reason: CacheReason
    """Why it was not more."""
    completion_tokens: int
    queue_s: float
    """From submission to the first prefill."""
    prompt_s: float
    """From the first prefill to the first token."""
    completion_s: float
    """From the first token to the last."""
    seed: int
    drafted_tokens: int = 0
    """Guesses that the model has judged."""
    accepted_draft_tokens: int = 0
    """Those that were right and are part of the output."""
    near_ties: int = 0
    """Draws of a resumed stream that were too near to call."""


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token and its log-probability under the raw logits."""

    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True)
class PositionLogprobs:
    """The log-probabilities at one position: the drawn token's, and the best ones, best first."""

    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Tokens:
    """Tokens that a stream has generated, and the text that became certain with them."""

    offset: int
    """Index of the first of them among the generated tokens."""
    ids: tuple[int, ...]
    text: str
    logprobs: tuple[PositionLogprobs, ...] = ()
    """One for each of `ids` where the stream asks for them, else none."""
    prompt_logprobs: tuple[PositionLogprobs, ...] = ()
    """On a stream's first event, where it asks for them: of the prompt's tokens."""


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of a stream, with what the last step brought.

    `ids` is empty when the last token ended the stream and is not part of the output. `stop` or
    `stop_token_id` say what matched, where something did.
    """

    offset: int
    ids: tuple[int, ...]
    text: str
    reason: FinishReason
    usage: Usage
    stop: str | None = None
    stop_token_id: int | None = None
    logprobs: tuple[PositionLogprobs, ...] = ()
    """One for each of `ids` where the stream asks for them, else none."""
    prompt_logprobs: tuple[PositionLogprobs, ...] = ()
    """As of `Tokens`."""
    embedding: tuple[float, ...] = ()
    """The prompt's vector, where that was asked for."""


@dataclass(frozen=True, slots=True)
class Failed:
    """The end of a stream that could not be completed."""

    error: MlxdError


Event = Tokens | Finished | Failed


@dataclass(frozen=True, slots=True)
class Occupancy:
    """How busy the engine is."""

    running: int = 0
    waiting: int = 0
    oldest_wait_s: float = 0.0
    kv_tokens_used: int = 0
    kv_tokens_capacity: int = 0


Tell = Callable[[], Sequence[Event]]
"""Returns what a stream has not been told yet; nothing where it has been told all."""


class Sink(ABC):
    """Where a stream's events go. Real: the event loop's stream; tests collect into a list."""

    @abstractmethod
    def put(self, event: Event) -> None:
        """Take one event, at once. Called on the engine thread."""

    def owe(self, tell: Tell) -> None:
        """Take what `tell` returns: now, or when this call is over, before anything else comes.

        Texts are written when `tell` is called, of several tokens at a time. Both are called on the
        engine thread.
        """
        for event in tell():
            self.put(event)


@dataclass(frozen=True, slots=True)
class Image:
    """An image at its place in a prompt."""

    name: bytes
    """A hash: of no other image."""
    start: int
    """Its first token's place."""
    tokens: int
    """How many it has."""
    pixels: bytes | memoryview
    """Rows of pixels as the model sees it, 8 bits for each of three colours."""
    grid: tuple[int, int] | None = None
    """Rows and columns of its places, where it keeps its shape and its places stand by these."""
    whole: bool = False
    """Whether its places see each other, both ways, so that no pass may cut it."""

    @property
    def shift(self) -> int:
        """By how much what follows stands elsewhere for rotations, by its longer side."""
        return 0 if self.grid is None else max(self.grid) - self.tokens

    @property
    def stop(self) -> int:
        """The place behind its last token."""
        return self.start + self.tokens


@dataclass(frozen=True, slots=True)
class Submit:
    """A stream to generate, checked against the model by the caller that submits it.

    `prompt` has at least one token and fewer than the effective context; where a stream is resumed,
    its last `resumed` tokens are the output so far. `eos_ids` is empty where end-of-sequence is
    ignored. `submitted_s` and `deadline_s` are on the engine's clock. Before it was submitted here,
    the request has waited for `age_s`: for its model, and at workers that died.
    """

    stream: StreamId
    prompt: tuple[int, ...]
    sampling: Sampling
    max_tokens: int | None
    submitted_s: float
    sink: Sink
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    eos_ids: frozenset[int] = frozenset()
    skip_special_tokens: bool = True
    request_id: str = ""
    """What the request is called in logs."""
    min_tokens: int = 0
    """No end of sequence, stop token or stop string before this many."""
    top_logprobs: int | None = None
    """How many alternatives each token's log-probability comes with; None: no log-probabilities."""
    prompt_logprobs: int | None = None
    """How many alternatives the log-probability of each of the prompt's tokens comes with; None:
    none is told. Not of a stream that is resumed."""
    scored_from: int = 1
    """The index of the first of the prompt's tokens that is told of: there is none before the
    first."""
    speculation_depth: int | None = None
    """The most tokens guessed at once, 0 for none; None is left to the engine."""
    priority: int = 0
    """Higher is served earlier."""
    deadline_s: float | None = None
    """When the stream is no longer wanted."""
    constraint: Grammar | CallConstraint | None = None
    """What complete output, or each call in it, must match; compiled for this model."""
    age_s: float = 0.0
    pooling: Pooling | None = None
    """How the prompt becomes a vector, where that is all that is asked: nothing is drawn then."""
    shown: Mapping[int, str] = field(default_factory=dict)
    """The ids that have these texts, whatever is left out of the text."""
    resumed: int = 0
    """How many tokens at the end of `prompt` an earlier worker has generated. They count as output,
    and neither they nor their text are told again. None of them ends the stream."""
    forced: tuple[int, ...] = ()
    """What an earlier worker has generated, where it is to be evaluated token by token as it was
    then; it is no part of `prompt`, and as little told again. Not with `resumed`."""
    images: tuple[Image, ...] = ()
    """What stands in the prompt instead of tokens, in order; never at its end."""
    keys: tuple[int, ...] = ()
    """What the prompt is looked up by where it has images: as long, and made of their names there.
    Empty: by its tokens."""

    @property
    def looked_up(self) -> tuple[int, ...]:
        """What the prompt is looked up by among former ones."""
        return self.keys or self.prompt

    @property
    def shift(self) -> int:
        """By how much what is generated stands elsewhere for rotations than at its position."""
        return sum([image.shift for image in self.images]) if self.images else 0

    @property
    def anchored(self) -> bool:
        """Whether the text is all that the tokens spell, as what complete output must match is."""
        return not isinstance(self.constraint, CallConstraint | None)

    @property
    def continues(self) -> bool:
        """Whether it resumes where another worker stopped."""
        return bool(self.resumed or self.forced)

    @property
    def prompt_tokens(self) -> int:
        """How many tokens the client's prompt has."""
        return len(self.prompt) - self.resumed

    def late(self, now_s: float) -> bool:
        """Tell whether the deadline has passed."""
        return self.deadline_s is not None and now_s >= self.deadline_s


@dataclass(frozen=True, slots=True)
class Cancel:
    """Forget a stream; one that ended already, or was never known, is ignored."""

    stream: StreamId
