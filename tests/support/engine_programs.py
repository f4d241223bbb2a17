"""Programs of what clients of all kinds do on one engine, and what must hold whatever they do.

Invariants checked after every step:
- A stream's offsets have no gap, it ends at most once, and nothing comes after its end or after its
  client has left. Only who may fail does, and with the error that tells why.
- A stream whose deadline has passed is gone after the next step.
- No more rows and snapshots than the bounds allow; the engine counts as many streams as live.
When all have ended: nothing is left in the caches, and every byte on the device has an account.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import mlx.core as mx
from hypothesis import strategies as st

from mlxd_shared.domain.errors import DeadlinePassed, InternalError, InvalidRequest, QueueFull
from mlxd_shared.domain.formats import FormatKind, ResponseFormat
from mlxd_shared.domain.requests import FinishReason, Sampling
from mlxd_worker.constraints.compiler import Constraints
from mlxd_worker.engine.masks.constraint import Constraint
from mlxd_worker.engine.request import Event, Failed, Finished, Submit
from mlxd_worker.engine.text import TextDecoder
from mlxd_worker.memory.ledger import Account, Ledger
from mlxd_worker.models.base import Model
from mlxd_worker.text.tokenizer import Tokenizer
from tests.support.batch_mixes import check_nothing_left
from tests.support.clocks import Clock
from tests.support.engines import STEPS_MAX, Collected, TinyEngine, engine_on
from tests.support.mlx_memory import live_nbytes
from tests.support.remembering import STRAY_NBYTES, tokens_of
from tests.worker.engine.speculation.guessing import eager

ROWS_MAX, WAITING_MAX, CONTEXT, CHUNK = 3, 3, 512, 32
PREFIX_NBYTES = 1 << 18
RESUMED_MAX = 100
DEADLINE_S = 10.0
REPEATING = ((60, 99.0), (61, 99.0))
"""A bias that leaves two tokens: what guesses are often right about."""
BROKEN = "broken"
"""The request id of a stream whose text cannot be decoded."""
FORMATS = (
    ResponseFormat(FormatKind.CHOICE, choices=("yes", "no", "nobody knows")),
    ResponseFormat(FormatKind.REGEX, r"[a-z]{3,40}!"),
)
PROMPT_TOKENS = (1, 5, 31, 64, 200, 250, 300, 480)
ENDS = tuple(range(40, 60))


@dataclass(frozen=True, slots=True)
class Come:
    """A client comes, with a prompt that begins as others' do."""

    beginning: int
    length: int
    sampling: Sampling
    max_tokens: int | None
    min_tokens: int
    ends: bool
    """Whether any of `ENDS` ends its stream."""
    requested: str
    """What it asks for beside: guesses, logprobs, format, what is left of it, or to be BROKEN."""
    hurry: bool
    """Whether it has a deadline."""
    priority: int


@dataclass(frozen=True, slots=True)
class GoOn:
    """The engine goes on."""

    steps: int


@dataclass(frozen=True, slots=True)
class Leave:
    """A client leaves, whether its stream waits, runs or is over."""

    which: int


@dataclass(frozen=True, slots=True)
class Wait:
    """Time passes before a step."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Shrink:
    """Somebody else wants the memory."""

    part: float


Action = Come | GoOn | Leave | Wait | Shrink


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
        offset = self.request.resumed
        for event in events:
            if not isinstance(event, Failed):
                assert event.offset == offset
                offset += len(event.ids)
                count = 0 if self.request.top_logprobs is None else len(event.ids)
                assert len(event.logprobs) == count
        if self.sink.ended:
            self._check_end(events[-1], offset)

    def _check_end(self, end: Event, generated: int) -> None:
        request = self.request
        if isinstance(end, Failed):
            may_fail = {
                QueueFull: generated == request.resumed,
                DeadlinePassed: request.deadline_s is not None,
                InternalError: request.request_id == BROKEN,
                InvalidRequest: generated < request.min_tokens or request.constraint is not None,
            }
            assert may_fail.get(type(end.error), False), end.error
            return
        assert isinstance(end, Finished)
        usage, reason = end.usage, end.reason
        assert usage.prompt_tokens == request.prompt_tokens
        assert usage.cached_tokens < usage.prompt_tokens + bool(request.resumed)
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
comes = st.builds(
    Come,
    beginning=st.integers(0, 2),
    length=st.sampled_from(PROMPT_TOKENS),
    sampling=samplings,
    max_tokens=st.sampled_from([40, 12, 1, None]),
    min_tokens=st.sampled_from([0, 0, 6]),
    ends=st.booleans(),
    requested=st.sampled_from(["", "guesses", "guesses", "logprobs", "format", "rest", BROKEN]),
    hurry=st.sampled_from([False, False, True]),
    priority=st.integers(0, 1),
)
goes_on = st.builds(GoOn, st.sampled_from([1, 2, 5, 15]))
leaves = st.builds(Leave, st.integers(0, 99))
waits = st.builds(Wait, st.sampled_from([0.001, 1.0, DEADLINE_S]))
shrinks = st.builds(Shrink, st.sampled_from([0.0, 0.3]))


def programs(*, actions_min: int, actions_max: int) -> st.SearchStrategy[list[Action]]:
    """Return drawn programs of so many actions."""
    action = st.one_of(goes_on, comes, comes, comes, goes_on, goes_on, leaves, waits, shrinks)
    return st.lists(action, min_size=actions_min, max_size=actions_max)


@dataclass(frozen=True, slots=True)
class Served:
    """A model, and what its clients' requests are made of."""

    model: Model
    tokenizer: Tokenizer
    constraints: Constraints


class World:
    """One engine that remembers and guesses, and its clients."""

    def __init__(self, served: Served) -> None:
        self._served = served
        self._clock = Clock(0.0)
        self._baseline_nbytes = live_nbytes()
        self.tiny: TinyEngine = engine_on(
            served.model,
            served.tokenizer,
            rows_max=ROWS_MAX,
            context_length=CONTEXT,
            waiting_max=WAITING_MAX,
            chunk=CHUNK,
            clock=self._clock,
            make_decoder=self._decoder,
            prefix_nbytes=PREFIX_NBYTES,
            controller=eager(),
        )
        self._ledger = Ledger()
        contents = self.tiny.caches.contents
        self._ledger.attach(Account.KV, "rows", self.tiny.caches)
        self._ledger.attach(Account.PREFIX, "snapshots", contents.book, tally=contents.book.tally)
        self.clients: list[Client] = []

    def run(self, program: Sequence[Action]) -> Counter[str]:
        """Perform a program, let all streams end, and check all of it; return what came of them."""
        for action in program:
            self._perform(action)
            self._check()
        for _ in range(STEPS_MAX):
            if not self.tiny.engine.busy:
                break
            self._step()
        assert not self._live
        self._audit()
        check_nothing_left(self.tiny)
        self._audit()
        return self._count_endings()

    @property
    def _live(self) -> list[Client]:
        return [client for client in self.clients if client.live]

    def _perform(self, action: Action) -> None:
        match action:
            case Come():
                self._come(action)
            case GoOn(steps):
                for _ in range(steps):
                    self._step()
            case Leave(which):
                self._leave(which)
            case Wait(seconds):
                self._clock.now_s += seconds
                self._step()
                assert not any(client.request.late(self._clock.now_s) for client in self._live)
            case Shrink(part):
                self.tiny.prefix.shrink(int(PREFIX_NBYTES * part))

    def _come(self, come: Come) -> None:
        guesses = come.requested == "guesses"
        sampling = replace(come.sampling, logit_bias=REPEATING if guesses else ())
        wanted = FORMATS[come.length % len(FORMATS)] if come.requested == "format" else None
        most = min(come.length, RESUMED_MAX, come.max_tokens or CONTEXT) - 1
        eos_ids = self._served.tokenizer.eos_ids
        request, sink = self.tiny.submit(
            tokens_of(come.beginning, come.length),
            sampling=sampling,
            max_tokens=come.max_tokens,
            resumed=most if come.requested == "rest" else 0,
            min_tokens=come.min_tokens,
            stop_token_ids=frozenset(ENDS if come.ends else ()),
            eos_ids=frozenset(eos_ids if wanted else ()),
            speculation_depth=8 if guesses else 0,
            top_logprobs=2 if come.requested == "logprobs" else None,
            constraint=None if wanted is None else self._compile(wanted),
            request_id=BROKEN if come.requested == BROKEN else "",
            deadline_s=self._clock.now_s + DEADLINE_S if come.hurry else None,
            submitted_s=self._clock.now_s,
            priority=come.priority,
        )
        self.clients.append(Client(request, sink))

    def _leave(self, which: int) -> None:
        if not self.clients:
            return
        client = self.clients[-1 - which % len(self.clients)]
        self.tiny.engine.cancel(client.request.stream)
        if client.live:
            client.left = len(client.sink.events)

    def _step(self) -> None:
        self.tiny.engine.step()
        self._check()

    def _check(self) -> None:
        for client in self.clients:
            client.check()
        load = self.tiny.engine.occupancy()
        assert load.running + load.waiting == len(self._live) == self.tiny.engine.streams
        assert load.running == len(self.tiny.caches.rows) <= ROWS_MAX
        assert len(self._live) <= ROWS_MAX + WAITING_MAX
        reports = self._reports()
        assert reports[Account.KV] == self.tiny.caches.nbytes
        assert reports[Account.PREFIX] == self.tiny.prefix.nbytes <= PREFIX_NBYTES

    def _audit(self) -> None:
        reports = self._reports()
        gc.collect()
        self._ledger.sweep()
        stray_nbytes = mx.get_active_memory() - self._baseline_nbytes - sum(reports.values())
        assert abs(stray_nbytes) <= STRAY_NBYTES
        assert self.tiny.caches.rows == ()

    def _count_endings(self) -> Counter[str]:
        seen: Counter[str] = Counter()
        for client in self.clients:
            last = client.sink.events[-1] if client.sink.ended else None
            name = type(last.error).__name__ if isinstance(last, Failed) else "finished"
            seen["left" if last is None else name] += 1
            seen["guessed"] += client.sink.guessed
            seen["reused"] += client.sink.reused
        return seen

    def _reports(self) -> dict[str, int]:
        return {report.name: report.nbytes for report in self._ledger.report()}

    def _compile(self, wanted: ResponseFormat) -> Constraint:
        constraints = self._served.constraints
        return constraints.find_kept(wanted) or constraints.compile(wanted)

    def _decoder(self, request: Submit) -> TextDecoder:
        if request.request_id == BROKEN:
            return Broken()
        return self._served.tokenizer.detokenizer(skip_special=request.skip_special_tokens)
