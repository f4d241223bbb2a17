"""Clients of all kinds on one engine, drawn step by step, and what must hold whatever they do.

Invariants checked after every step:
- A stream's offsets have no gap, it ends at most once, and nothing comes after its end or after its
  client has left. Only who may fail does, and with the error that tells why.
- A stream whose deadline has passed is gone after the next step.
- No more rows and snapshots than the bounds allow; the engine counts as many streams as live.
When all have ended: nothing is left in the caches, and every byte on the device has an account.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass
from typing import Any, cast

import mlx.core as mx
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mlxd_shared.errors import DeadlinePassed, InternalError, InvalidRequest, QueueFull
from mlxd_shared.formats import FormatKind, ResponseFormat
from mlxd_shared.requests import FinishReason, Sampling
from mlxd_worker.constraints.compiler import Constraints
from mlxd_worker.engine.request import Event, Failed, Finished, Submit
from mlxd_worker.engine.text import TextDecoder
from mlxd_worker.memory.ledger import Account, Ledger
from mlxd_worker.models.base import Model
from mlxd_worker.tokenizer import Tokenizer
from tests.support.batch_mixes import check_nothing_left
from tests.support.engines import STEPS_MAX, Collected, TinyEngine, engine_on
from tests.support.remembering import STRAY_NBYTES, tokens_of

ROWS_MAX, WAITING_MAX, CONTEXT, CHUNK = 3, 3, 512, 32
PREFIX_NBYTES = 1 << 18
DEADLINE_S = 10.0
BROKEN = "broken"
"""The request id of a stream whose text cannot be decoded."""
FORMATS = (
    ResponseFormat(FormatKind.CHOICE, choices=("yes", "no", "nobody knows")),
    ResponseFormat(FormatKind.REGEX, r"[a-z]{3,40}!"),
)
PROMPT_TOKENS = (1, 5, 31, 64, 200, 250, 300, 480)
ENDS = tuple(range(40, 60))


@dataclass(slots=True)
class Client:
    """One stream, as its client knows it."""

    request: Submit
    sink: Collected
    left: int | None = None
    """How many events there were when the client went away."""

    @property
    def live(self) -> bool:
        """Whether something more may come."""
        return self.left is None and not self.sink.ended

    def check(self) -> None:
        """Assert what holds of any stream at any time."""
        events = self.sink.events
        assert self.left is None or len(events) == self.left, "an event after the client has left"
        assert not any(isinstance(event, Finished | Failed) for event in events[:-1])
        offset = 0
        for event in events:
            if not isinstance(event, Failed):
                assert event.offset == offset
                offset += len(event.ids)
                told = 0 if self.request.top_logprobs is None else len(event.ids)
                assert len(event.logprobs) == told
        if self.sink.ended:
            self._check_end(events[-1], offset)

    def _check_end(self, end: Event, generated: int) -> None:
        request = self.request
        if isinstance(end, Failed):
            may_fail = {
                QueueFull: not generated,
                DeadlinePassed: request.deadline_s is not None,
                InternalError: request.request_id == BROKEN,
                InvalidRequest: generated < request.min_tokens or request.constraint is not None,
            }
            assert may_fail.get(type(end.error), False), end.error
            return
        assert isinstance(end, Finished)
        usage, reason = end.usage, end.reason
        assert usage.prompt_tokens == len(request.prompt)
        assert usage.cached_tokens < usage.prompt_tokens
        assert usage.completion_tokens == generated
        assert usage.accepted_draft_tokens <= min(usage.drafted_tokens, generated)
        if reason is FinishReason.LENGTH:
            assert generated == request.max_tokens
        elif reason is FinishReason.CONTEXT:
            assert generated + usage.prompt_tokens == CONTEXT
        else:
            assert generated >= request.min_tokens
        if reason is FinishReason.STOP_TOKEN:
            assert end.stop_token_id in request.stop_token_ids
        assert not set(self.sink.ids) & request.stop_token_ids


class Broken:
    """A decoder that gives up at its third token."""

    def __init__(self) -> None:
        self._pushed = 0

    def push(self, token_id: int) -> str:
        """Take two."""
        self._pushed += 1
        if self._pushed > 2:
            raise RuntimeError("broken on purpose")
        return ""

    def finish(self) -> str:
        """Hold nothing back."""
        return ""


class Clock:
    """A clock that somebody sets."""

    now_s = 0.0

    def __call__(self) -> float:
        """Return the time."""
        return self.now_s


samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.8, 1.5]),
    top_k=st.sampled_from([0, 1, 40]),
    top_p=st.sampled_from([1.0, 0.9]),
    min_p=st.sampled_from([0.0, 0.1]),
    seed=st.integers(0, 9),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    xtc_probability=st.sampled_from([0.0, 0.5]),
)


class EngineMachine(RuleBasedStateMachine):
    """Clients come, wait, leave and let deadlines pass, on one engine that remembers."""

    def __init__(self, model: Model, tokenizer: Tokenizer, constraints: Constraints) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self._constraints = constraints
        self._clock = Clock()
        gc.collect()
        mx.clear_cache()
        self._baseline_nbytes = mx.get_active_memory()
        self._tiny: TinyEngine = engine_on(
            model,
            tokenizer,
            rows_max=ROWS_MAX,
            context_length=CONTEXT,
            waiting_max=WAITING_MAX,
            chunk=CHUNK,
            clock=self._clock,
            make_decoder=self._decoder,
            prefix_nbytes=PREFIX_NBYTES,
        )
        self._ledger = Ledger()
        contents = self._tiny.caches.contents
        self._ledger.attach(Account.KV, "rows", self._tiny.caches)
        self._ledger.attach(Account.PREFIX, "snapshots", contents, tally=contents.tally)
        self._clients: list[Client] = []

    @rule(
        beginning=st.integers(0, 2),
        length=st.sampled_from(PROMPT_TOKENS),
        sampling=samplings,
        max_tokens=st.sampled_from([None, 1, 4, 40]),
        min_tokens=st.sampled_from([0, 0, 6]),
        ends=st.booleans(),
        asked=st.sampled_from(["", "", "guesses", "logprobs", "format", BROKEN]),
        hurry=st.booleans(),
        priority=st.integers(0, 1),
    )
    def come(
        self,
        beginning: int,
        length: int,
        sampling: Sampling,
        asked: str,
        *,
        ends: bool,
        hurry: bool,
        **given: Any,
    ) -> None:
        """A client comes, with a prompt that begins as others' do."""
        wanted = FORMATS[length % len(FORMATS)] if asked == "format" else None
        request, sink = self._tiny.submit(
            tokens_of(beginning, length),
            sampling=sampling,
            stop_token_ids=frozenset(ENDS if ends else ()),
            eos_ids=frozenset(self._tokenizer.eos_ids if wanted else ()),
            speculation_depth=8 if asked == "guesses" else 0,
            top_logprobs=2 if asked == "logprobs" else None,
            constraint=None if wanted is None else self._compiled(wanted),
            request_id=BROKEN if asked == BROKEN else "",
            deadline_s=self._clock.now_s + DEADLINE_S if hurry else None,
            submitted_s=self._clock.now_s,
            **given,
        )
        self._clients.append(Client(request, sink))

    @rule(steps=st.sampled_from([1, 1, 3, 20]))
    def go_on(self, steps: int) -> None:
        """The engine goes on."""
        for _ in range(steps):
            self._step()

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        """A client leaves, whether its stream waits or runs."""
        client = data.draw(st.sampled_from(self.live))
        self._tiny.engine.cancel(client.request.stream)
        client.left = len(client.sink.events)

    @precondition(lambda self: self._clients)
    @rule(data=st.data())
    def leave_again(self, data: st.DataObject) -> None:
        """Nobody minds a cancel of a stream that is over."""
        over = [client for client in self._clients if not client.live]
        if over:
            self._tiny.engine.cancel(data.draw(st.sampled_from(over)).request.stream)

    @rule(seconds=st.sampled_from([0.001, 1.0, DEADLINE_S]))
    def wait(self, seconds: float) -> None:
        """Time passes; whoever is late by then is gone after one step."""
        self._clock.now_s += seconds
        self._step()
        assert not any(client.request.late(self._clock.now_s) for client in self.live)

    @rule(part=st.sampled_from([0.0, 0.3]))
    def shrink(self, part: float) -> None:
        """Somebody else wants the memory."""
        self._tiny.prefix.shrink(int(PREFIX_NBYTES * part))

    @invariant()
    def holds(self) -> None:
        """Check every stream, and the bounds."""
        for client in self._clients:
            client.check()
        load = self._tiny.engine.occupancy()
        assert load.running + load.waiting == len(self.live) == self._tiny.engine.streams
        assert load.running == len(self._tiny.caches.rows) <= ROWS_MAX
        reports = self._reports()
        assert reports[Account.KV] == self._tiny.caches.nbytes
        assert reports[Account.PREFIX] == self._tiny.prefix.nbytes <= PREFIX_NBYTES

    def teardown(self) -> None:
        """Let all streams end; nothing of them is left."""
        for _ in range(STEPS_MAX):
            if not self._tiny.engine.busy:
                break
            self._step()
        self.holds()
        assert not self.live
        self._audit()
        check_nothing_left(self._tiny)
        self._audit()

    @property
    def live(self) -> list[Client]:
        """The clients whose streams go on."""
        return [client for client in self._clients if client.live]

    def _step(self) -> None:
        self._tiny.engine.step()

    def _audit(self) -> None:
        reports = self._reports()
        assert reports[Account.KV] == 0
        gc.collect()
        self._ledger.sweep()
        stray_nbytes = mx.get_active_memory() - self._baseline_nbytes - reports[Account.PREFIX]
        assert abs(stray_nbytes) <= STRAY_NBYTES

    def _reports(self) -> dict[Account, int]:
        return {report.account: report.nbytes for report in self._ledger.report()}

    def _compiled(self, wanted: ResponseFormat) -> Any:
        return self._constraints.kept(wanted) or self._constraints.compile(wanted)

    def _decoder(self, request: Submit) -> TextDecoder:
        if request.request_id == BROKEN:
            return Broken()
        skip_special = request.skip_special_tokens
        return cast("TextDecoder", self._tokenizer.detokenizer(skip_special=skip_special))
