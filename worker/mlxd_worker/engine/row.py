"""One stream in the engine: how far its prompt is evaluated, and what a new token does to it.

Invariants:
- `offset` tokens of prompt + generated stand in the caches; the next one to evaluate is `pending`.
- A token is judged once: stop token, end of sequence, stop string, length, context, in this order.
- Under a constraint only tokens that its mask allows are drawn, and the stream ends, as if by an
  end of sequence, where it is complete and nothing can follow.
- Text is cut before a stop string; everything held back is flushed when the stream ends otherwise.
- Before `min_tokens` nothing that ends the stream is drawn, and no stop string counts.
- A token's log-probabilities go with its id, never later, whatever text is held back.
- prompt + generated never exceed the context: the last generated token is never evaluated.
- A constraint on calls is asleep until one begins (`CallMatcher`). Asleep it is told what was drawn
  and masks nothing.
- A row whose constraint has to go on first (`advance`) draws nothing meanwhile. Its last token is
  judged when the constraint has taken it, before the mask behind it is there: a stream that ends
  with it neither waits for that one nor fails by it.
- A resumed row stands, in text, penalties, constraint and positions, where who drew them stood.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from mlxd_shared.domain.cache_reasons import CacheReason
from mlxd_shared.domain.errors import InvalidRequest
from mlxd_shared.domain.requests import FinishReason
from mlxd_worker.cache.base import RowId
from mlxd_worker.engine.masks.advance import Advance, Follower
from mlxd_worker.engine.masks.calls import CallMatcher
from mlxd_worker.engine.masks.masks import AllowedTokens
from mlxd_worker.engine.masks.replayed import check_replayed, wrong_token
from mlxd_worker.engine.pooling import Pool
from mlxd_worker.engine.request import Finished, PositionLogprobs, Submit, Tokens, Usage
from mlxd_worker.engine.sampling.penalties import RecentTokens
from mlxd_worker.engine.sampling.sampler import TOKEN_INVALID, TOKEN_NONE, Draw
from mlxd_worker.engine.scoring import Scores
from mlxd_worker.engine.text import Piece, TextStream


@dataclass(slots=True)
class Row:
    """The mutable state of one admitted stream. One owner: the engine thread."""

    id: RowId
    request: Submit
    text: TextStream
    context_length: int
    offset: int = 0  # tokens of this row in the caches
    output: list[int] = field(init=False)
    """The ids generated so far, without the stop or end-of-sequence token."""
    reported_count: int = field(init=False)
    """How many of these the stream has been told, or never will be."""
    broken: bool = False
    """Whether its text cannot be written; its stream has been told."""
    pending: int = -1
    """The token to evaluate next, once the prompt is prefilled."""
    cached: int = 0  # prompt tokens whose state was reused
    cache_reason: CacheReason = CacheReason.NONE
    """Why it was not more."""
    drafted: int = 0  # guesses that were judged
    accepted: int = 0  # generated tokens that had been guessed
    near_ties: int = 0  # draws of a resumed row that were too near to call
    prefill_started_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    recent: RecentTokens = field(init=False)
    """What penalties look at: the last tokens of prompt and output."""
    ends: tuple[int, ...] = field(init=False)
    """The ids that end the stream, in rising order."""
    matcher: Follower | None = field(init=False, default=None)
    """Where the output stands in its constraint; None where it has none."""
    advance: Advance | None = field(init=False, default=None)
    """What the constraint is at; None where nothing keeps the row from drawing."""
    pool: Pool | None = field(init=False, default=None)
    """What becomes the prompt's vector; None where the row generates."""
    scores: Scores | None = field(init=False, default=None)
    """What gathers the log-probabilities of the prompt's tokens; None where nobody asks."""
    decodes_from: float = field(init=False)
    """The offset from which on it decodes: but one token of the prompt stands; inf: never."""
    shift: int = field(init=False)  # as the request's, which counts it anew each time
    most: int = field(init=False)
    """How many tokens the stream may generate, by its request and its context."""
    _is_plain: bool = field(init=False)
    plain: bool = field(init=False)
    """Whether of its tokens nothing but an end is to be looked for (`judging`)."""
    next_draw: Draw | None = field(init=False, default=None)  # None: not made up yet
    _greedy_draw: Draw | None = field(init=False, default=None)  # no place in the stream changes it

    def __post_init__(self) -> None:
        """Bring a resumed row to where it was.

        Raises:
            InvalidRequest: this request cannot have had the tokens it resumes from.
        """
        request, prompt = self.request, self.request.prompt
        self.pool = None if request.pooling is None else Pool(request.pooling)
        if request.prompt_logprobs is not None and len(prompt) > 1:
            self.scores = Scores(prompt, begin=request.scored_from, count=request.prompt_logprobs)
        self.shift = request.shift
        self.ends = tuple(sorted(request.eos_ids | request.stop_token_ids))
        self.decodes_from = math.inf if self.embeds else len(prompt) - 1
        room = self.context_length - request.prompt_tokens
        self.most = room if request.max_tokens is None else min(request.max_tokens, room)
        watched = request.continues or request.top_logprobs is not None
        self._is_plain = not (watched or request.sampling.penalises)
        free = self._is_plain and request.constraint is None
        self.plain = free and not request.stop
        if free and request.sampling.temperature == 0.0:
            self._greedy_draw = Draw(request.sampling, position=0, ends=self.ends)
        self.recent = RecentTokens(request.sampling, prompt)
        self.output = list(prompt[request.prompt_tokens :])
        self.reported_count = len(self.output)
        for index, token_id in enumerate(self.output):
            self._replay(index, token_id)
        if self.request.constraint is not None:
            self.matcher = self.request.constraint.start()
            if self.output:
                self.advance = Advance(self.matcher, tuple(self.output), draws=self.left > 0)

    @property
    def foreseeable(self) -> bool:
        """Whether the draw after the next one needs nothing of the token that is drawn first.

        Nor is a resumed row drawn ahead: its draws are watched.
        """
        follower = self.matcher
        return self._is_plain and (follower is None or not (follower.is_awake or follower.may_wake))

    @property
    def is_held(self) -> bool:
        """Whether a mask says which tokens may be drawn next."""
        return self.matcher is not None and self.matcher.is_awake

    @property
    def generated(self) -> int:
        """How many tokens have been generated."""
        return len(self.output)

    @property
    def drawn(self) -> int:
        """How many of them were generated here."""
        return len(self.output) - self.request.resumed

    @property
    def forcing(self) -> bool:
        """Whether the next token is known, whatever is drawn; it is not emitted again."""
        return self.generated < len(self.request.forced)

    @property
    def prefill_left(self) -> int:
        """Prompt tokens still to evaluate before the last one, whose logits are the first draw.

        Where nothing is drawn they are all of them.
        """
        return max(len(self.request.prompt) - (not self.embeds) - self.offset, 0)

    @property
    def embeds(self) -> bool:
        """Whether the prompt's vector is all that is asked: such a row never decodes."""
        return self.pool is not None

    @property
    def decoding(self) -> bool:
        """Whether the row takes part in decode steps."""
        return self.offset >= self.decodes_from

    @property
    def begun(self) -> bool:
        """Whether the prompt has been looked up, and is being evaluated or was."""
        return self.prefill_started_s is not None

    def next_chunk(self, tokens_max: int) -> tuple[int, ...]:
        """Return the prompt's next tokens to prefill, at most `tokens_max`."""
        return self.request.prompt[self.offset : self.offset + min(self.prefill_left, tokens_max)]

    def next_token(self) -> int:
        """Return the token whose logits give the next draw."""
        return self.pending if self.drawn else self.request.prompt[-1]

    def prepare(self) -> None:
        """Make up how the next token is to be drawn, where that may fail: first, or under a mask.

        Raises:
            Exception: whatever it is, it concerns this row alone.
        """
        if self.is_held or not self.drawn:
            self.draw()

    def draw(self) -> Draw:
        """Return how the next token is to be drawn; good until `take`."""
        if self.next_draw is None:
            self.next_draw = self._draw_at(self.generated, self.recent.counts)
        return self.next_draw

    def draw_after(self) -> Draw:
        """Return how the token after the next one is to be drawn, where that is `foreseeable`."""
        position, greedy = len(self.output) + 1, self._greedy_draw
        early = position < self.request.min_tokens
        return self._draw_at(position, self.recent.counts) if early or greedy is None else greedy

    def draws(self, guesses: Sequence[int]) -> list[Draw]:
        """Return `draw`, and then how a token is to be drawn after each guess if they are right."""
        ahead = self.recent.ahead(guesses)
        places = enumerate(ahead, start=self.generated + 1)
        return [self.draw(), *(self._draw_at(place, seen) for place, seen in places)]

    def follow(self, token_id: int) -> Advance | None:
        """Return what the constraint has to do before a drawn token can be judged; None: nothing.

        Until `go_on` the row takes no part in steps.
        """
        if self.matcher is not None and self.matcher.is_awake and token_id >= 0:
            draws = self.left > 1
            if self.forcing:
                forced = (self.request.forced[self.generated],)
                self.advance = Advance(self.matcher, forced, draws=draws)
            elif token_id not in self.ends:
                self.advance = Advance(self.matcher, (token_id,), draws=draws)
        return self.advance

    def go_on(self) -> None:
        """Take part in steps again, now that the constraint is where the next token is drawn.

        Raises:
            Exception: it cannot be drawn; whatever it is, it concerns this row alone.
        """
        advance, self.advance = self.advance, None
        assert advance is not None, "nothing was waited for"
        if not self.drawn:
            advance.check()
            # Drawn tokens are judged by `take`.
            check_replayed(advance, first=0, min_tokens=self.request.min_tokens)
        advance.check_mask()

    def take(
        self, token_id: int, now_s: float, logprobs: PositionLogprobs | None = None
    ) -> Tokens | Finished:
        """Judge a drawn token; return what the stream's client is told.

        `logprobs` are the token's own, where the stream asks for them. After a Finished the row
        takes nothing more.

        Raises:
            ArithmeticError: the logits cannot be drawn from; the model is at fault.
            InvalidRequest: what the request asks for leaves no token to draw, cannot have led to
                the token that is forced, or has a constraint beyond its bounds.
        """
        self.next_draw = None
        advance = self.advance
        if advance is not None:
            advance.check()
        if token_id == TOKEN_INVALID:
            raise ArithmeticError("the model's logits are not numbers")
        if token_id == TOKEN_NONE:
            raise self._impossible()
        request = self.request
        if request.forced and self.forcing:
            return self._take_forced(advance)
        if self.first_token_s is None:
            self.first_token_s = now_s
        self.last_token_s = now_s
        if token_id in self.ends:
            stops = token_id in request.stop_token_ids
            end = FinishReason.STOP_TOKEN if stops else FinishReason.EOS
            return self._end_before(end, token_id)
        offset = len(self.output)
        self.output.append(token_id)
        self.pending = token_id
        self.recent.push(token_id)
        own_logprobs = () if logprobs is None else (logprobs,)
        piece = self.text.push(token_id, may_end=offset + 1 >= request.min_tokens)
        if piece.stop is not None:
            return self._finish(FinishReason.STOP_STRING, (token_id,), piece, logprobs=own_logprobs)
        self._note_asleep(token_id, judged=advance)
        ends = advance is not None or len(self.output) >= self.most
        reason = self._reason_to_end(advance) if ends else None
        if reason is None:
            return Tokens(offset, (token_id,), piece.text, own_logprobs)
        tail = self.text.finish()
        whole = Piece(piece.text + tail.text, tail.stop)
        return self._finish(reason, (token_id,), whole, logprobs=own_logprobs)

    def _note_asleep(self, token_id: int, *, judged: Advance | None) -> None:
        """Tell a constraint that was asleep what was drawn; it may wake, and have to go on."""
        follower = self.matcher
        if judged is None and isinstance(follower, CallMatcher):
            follower.see(token_id)
            if follower.has_rest and self.left > 0:
                self.advance = Advance(follower, ())

    def usage(self) -> Usage:
        """Return what the stream has cost so far."""
        submitted_s = self.request.submitted_s
        started_s = submitted_s if self.prefill_started_s is None else self.prefill_started_s
        first_s = started_s if self.first_token_s is None else self.first_token_s
        last_s = first_s if self.last_token_s is None else self.last_token_s
        return Usage(
            prompt_tokens=self.request.prompt_tokens,
            cached_tokens=min(self.cached, self.request.prompt_tokens),
            cache_reason=self.cache_reason,
            completion_tokens=self.generated,
            queue_s=started_s - submitted_s,
            prompt_s=first_s - started_s,
            completion_s=last_s - first_s,
            seed=self.request.sampling.seed,
            drafted_tokens=self.drafted,
            accepted_draft_tokens=self.accepted,
            near_ties=self.near_ties,
        )

    def finish_embedding(self) -> Finished:
        """Return the end of a row that embeds; all of its prompt is evaluated."""
        assert self.pool is not None, "a row that generates"
        vector = self.pool.vector(len(self.request.prompt))
        return Finished(0, (), "", FinishReason.EOS, self.usage(), embedding=vector)

    def _take_forced(self, advance: Advance | None) -> Tokens:
        index = self.generated
        token_id = self.request.forced[index]
        if advance is not None:
            check_replayed(advance, first=index, min_tokens=self.request.min_tokens)
        self._replay(index, token_id)
        self.output.append(token_id)
        self.pending = token_id
        self.recent.push(token_id)
        self._note_asleep(token_id, judged=advance)
        return Tokens(index, (token_id,), "")

    def _replay(self, index: int, token_id: int) -> None:
        """Take a token that an earlier worker has generated, and told."""
        if self.text.push(token_id, may_end=index + 1 >= self.request.min_tokens).stop:
            raise wrong_token(index, token_id, "completes a stop string: the stream had ended")

    def _draw_at(self, position: int, recent: Mapping[int, int]) -> Draw:
        early = position < self.request.min_tokens
        if self._greedy_draw is not None and not early:
            return self._greedy_draw
        follower = self.matcher if self.is_held else None
        return Draw(
            self.request.sampling,
            position=position,
            recent=recent,
            forbidden=self.ends if early else (),
            mask=None if follower is None else AllowedTokens(follower.mask()),
            ends=self.ends,
            watched=self.request.continues and position >= len(self.request.forced),
        )

    def _impossible(self) -> InvalidRequest:
        """Return what to tell a client whose request leaves no token to draw at this place."""
        if self.generated < self.request.min_tokens:
            problem = f"after {self.generated} tokens nothing is left but to end the stream"
            return InvalidRequest.of("min_tokens", problem)
        problem = f"no token of the vocabulary may follow after {self.generated} tokens"
        field_name = "response_format" if self.matcher is None else self.matcher.constraint.field
        return InvalidRequest.of(field_name, problem)

    @property
    def left(self) -> int:
        """How many tokens the stream may still generate."""
        return self.most - len(self.output)

    def _reason_to_end(self, advance: Advance | None) -> FinishReason | None:
        over = advance is not None and advance.seen.over_after is not None
        if over and self.generated >= self.request.min_tokens:
            return FinishReason.EOS
        most = self.request.max_tokens
        if most is not None and self.generated >= most:
            return FinishReason.LENGTH
        if self.request.prompt_tokens + self.generated == self.context_length:
            return FinishReason.CONTEXT
        return None

    def _end_before(self, reason: FinishReason, token_id: int) -> Finished:
        """End the stream at a token that is not part of it."""
        return self._finish(reason, (), self.text.finish(), stop_token_id=token_id)

    def _finish(
        self,
        reason: FinishReason,
        ids: tuple[int, ...],
        piece: Piece,
        *,
        stop_token_id: int | None = None,
        logprobs: tuple[PositionLogprobs, ...] = (),
    ) -> Finished:
        """Return the end; text held back may have completed a stop string, which then counts."""
        stopped = piece.stop is not None
        return Finished(
            offset=self.generated - len(ids),
            ids=ids,
            text=piece.text,
            reason=FinishReason.STOP_STRING if stopped else reason,
            usage=self.usage(),
            stop=piece.stop,
            stop_token_id=None if stopped else stop_token_id,
            logprobs=logprobs,
        )
