"""Counts one Generate with all its choices, however it ends."""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType

import grpc

from mlxd.v1 import inference_pb2
from mlxd_controller.metrics.counters import Metrics
from mlxd_controller.metrics.phases import Waits, phases_of
from mlxd_controller.runtime.ports import Clock
from mlxd_shared.ops.logs import get_logger
from mlxd_shared.ops.tracing import Span, current_span
from mlxd_shared.wire.convert import CACHE_REASON_TO_PB, FINISH_FROM_PB
from mlxd_shared.wire.records import duration_from_pb
from mlxd_shared.wire.status import end_code

NO_FINISH = "none"
UNKNOWN_REASON = "unknown"
"""The label for a reason that only a worker of another version knows."""
UNKNOWN_MODEL = "unknown"
"""The label for requests that name no known model, so that clients cannot grow the metrics."""
_REASONS = {number: reason.value for reason, number in CACHE_REASON_TO_PB.items()}
_log = get_logger("inference")


@dataclass(slots=True)
class Counts:
    """The token counts of one call; 0 until it has ended."""

    prompt_tokens: int = 0
    generated_tokens: int = 0
    """By this call alone: a resumed stream had others before."""


class Meter:
    """A context around one Generate; `model` and `request_id` are set as soon as they are known."""

    def __init__(self, metrics: Metrics, clock: Clock) -> None:
        self.model = UNKNOWN_MODEL
        self.request_id = ""
        self.resumed = 0
        """How many tokens the client already had."""
        self.counts = Counts()
        self._metrics = metrics
        self._clock = clock
        self._start_s = clock.now_s()
        self._first_s: float | None = None
        self._last: inference_pb2.GenerateResponse | None = None
        self._broken = False

    @property
    def age_s(self) -> float:
        """Seconds since the request arrived."""
        return self._clock.now_s() - self._start_s

    def note_frame(self) -> None:
        """Note a message of the stream."""
        if self._first_s is None:
            self._first_s = self.age_s
            self._metrics.first_token.observe(self._first_s, model=self.model)

    def note_break(self, tokens: int, *, prompt_tokens: int) -> None:
        """Note that a choice's stream broke off, and the tokens it had carried.

        prompt_tokens: those of its prompt, if a message has arrived; 0 for further choices.
        """
        self._broken = True
        self.counts.prompt_tokens += prompt_tokens
        self.counts.generated_tokens += tokens
        self._metrics.prompt_tokens.add(prompt_tokens, model=self.model)
        self._metrics.generated_tokens.add(tokens, model=self.model)

    def complete(self, last: inference_pb2.GenerateResponse) -> None:
        """Note the last message of a choice's stream, which carries its usage."""
        self._last = last
        metrics, usage, model = self._metrics, last.usage, self.model
        generated = usage.completion_tokens - self.resumed
        self.counts.prompt_tokens += usage.prompt_tokens
        self.counts.generated_tokens += generated
        metrics.prompt_tokens.add(usage.prompt_tokens, model=model)
        metrics.cached_tokens.add(usage.cached_tokens, model=model)
        metrics.generated_tokens.add(generated, model=model)
        if usage.prompt_tokens:  # only the first of several choices reports the prompt
            lookups = metrics.cache_hits if usage.cached_tokens else metrics.cache_misses
            lookups.add(model=model, reason=_REASONS.get(usage.cache_reason, UNKNOWN_REASON))
        metrics.queue.observe(duration_from_pb(usage.queue_duration), model=model)
        metrics.load_wait.observe(duration_from_pb(usage.load_duration), model=model)
        gaps = usage.completion_tokens - 1
        if gaps > 0 and not self.resumed and not usage.migrations:  # otherwise it covers a part
            mean_s = duration_from_pb(usage.completion_duration) / gaps
            metrics.inter_token.observe(mean_s, times=gaps, model=model)

    def __enter__(self) -> Meter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        seconds = self.age_s
        code, finish, tokens = end_code(error), NO_FINISH, 0
        if self._last is not None and not self._broken:
            code, tokens = grpc.StatusCode.OK, self.resumed + self.counts.generated_tokens
            reason = FINISH_FROM_PB.get(self._last.finish.reason)
            finish = NO_FINISH if reason is None else reason.value
        span = current_span.get()
        if span is not None:
            self._trace(span, finish)
        self._metrics.requests.add(model=self.model, code=code.name, finish_reason=finish)
        self._metrics.duration.observe(seconds, model=self.model)
        _log.info(
            "generate ended",
            code=code.name,
            finish=finish,
            tokens=tokens,
            seconds=round(seconds, 3),
        )

    def _trace(self, span: Span, finish: str) -> None:
        """Tell a trace what the call was, and where its time went."""
        span.note(
            {
                "gen_ai.request.model": self.model,
                "gen_ai.usage.input_tokens": self.counts.prompt_tokens,
                "gen_ai.usage.output_tokens": self.counts.generated_tokens,
                "gen_ai.response.finish_reasons": (finish,),
                "mlxd.request_id": self.request_id,
            }
        )
        waits = None
        if self._last is not None and not self._last.usage.migrations:
            usage = self._last.usage
            waits = Waits(
                load_s=duration_from_pb(usage.load_duration),
                queue_s=duration_from_pb(usage.queue_duration),
                prompt_s=duration_from_pb(usage.prompt_duration),
            )
        for phase in phases_of(self.age_s, self._first_s, waits):
            span.add_phase(phase.name, phase.begun_ago_s, phase.ended_ago_s)
