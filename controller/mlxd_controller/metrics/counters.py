"""What the controller counts. One owner: the event loop's thread; names as Prometheus has them."""

from __future__ import annotations

from dataclasses import dataclass

import grpc

from mlxd_shared.domain.cache_reasons import CacheReason
from mlxd_shared.ops.metrics import Counter, Histogram

NO_FINISH = "none"
UNKNOWN_REASON = "unknown"
"""The label of what a worker of another version may call a reason."""
UNKNOWN_MODEL = "unknown"
"""The label of requests that name no model of ours, so that clients cannot grow the metrics."""

AGE_BOUNDS_S = (1.0, 10.0, 60.0, 300.0, 900.0, 3600.0, 4 * 3600.0, 86_400.0, 7 * 86_400.0)


@dataclass(frozen=True, slots=True)
class StreamUsage:
    """What a complete stream cost; `cache_reason` None: one of a later version."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    queue_s: float
    load_s: float
    completion_s: float
    cache_reason: CacheReason | None
    migrations: int


class Metrics:
    """All counters and histograms of a controller, 0 at its start."""

    def __init__(self) -> None:
        self.requests = Counter(
            "mlxd_requests_total", "Generate calls by model, status code and finish reason."
        )
        self.prompt_tokens = Counter(
            "mlxd_prompt_tokens_total", "Prompt tokens, cached ones included."
        )
        self.cached_tokens = Counter(
            "mlxd_cached_tokens_total", "Prompt tokens whose state was reused."
        )
        self.generated_tokens = Counter(
            "mlxd_generation_tokens_total", "Tokens generated, for streams that broke off too."
        )
        self.cache_hits = Counter(
            "mlxd_cache_hits_total", "Requests that reused state, by why it was not more."
        )
        self.cache_misses = Counter(
            "mlxd_cache_misses_total", "Requests that reused no state, by why."
        )
        self.loads = Counter("mlxd_model_loads_total", "Loads begun, by what asked for them.")
        self.cold_starts = Counter(
            "mlxd_model_cold_starts_total", "Requests that had to wait for their model."
        )
        self.evictions = Counter(
            "mlxd_model_evictions_total",
            "Models unloaded, by why: room, expired, asked, pressure, shutdown.",
        )
        self.shrinks = Counter(
            "mlxd_model_shrinks_total",
            "Times that a worker was told to give memory back, by outcome: done, failed.",
        )
        self.shrunk_bytes = Counter(
            "mlxd_model_shrunk_bytes_total", "What workers gave back when they were told to."
        )
        self.restarts = Counter(
            "mlxd_worker_restarts_total",
            "Loads after a failure, by what ended the worker before.",
        )
        self.migrations = Counter(
            "mlxd_migrations_total",
            "Requests sent to another worker after a loss, by whether their stream had begun.",
        )
        self.first_token = Histogram(
            "mlxd_time_to_first_token_seconds", "From a request's arrival to its first token."
        )
        self.inter_token = Histogram(
            "mlxd_inter_token_latency_seconds",
            "A request's mean time between tokens, once a gap.",
        )
        self.queue = Histogram(
            "mlxd_queue_time_seconds", "From a worker's acceptance to the first prefill."
        )
        self.load_wait = Histogram(
            "mlxd_load_wait_seconds", "What requests waited for their model to be ready."
        )
        self.duration = Histogram(
            "mlxd_e2e_request_latency_seconds", "From a request's arrival to its end."
        )
        self.load_seconds = Histogram("mlxd_model_load_seconds", "Duration of loads, by outcome.")
        self.age_at_eviction = Histogram(
            "mlxd_model_age_at_eviction_seconds",
            "How long an unloaded model had been ready, by why it was unloaded.",
            bounds=AGE_BOUNDS_S,
        )

    def count_end(
        self, *, model: str, code: grpc.StatusCode, finish: str, duration_s: float
    ) -> None:
        """Count one Generate that is over, however it ended."""
        self.requests.add(model=model, code=code.name, finish_reason=finish)
        self.duration.observe(duration_s, model=model)

    def count_use(self, usage: StreamUsage, *, model: str, resumed: int = 0) -> None:
        """Count what a complete stream cost; `resumed` tokens of it its client had before."""
        self.prompt_tokens.add(usage.prompt_tokens, model=model)
        self.cached_tokens.add(usage.cached_tokens, model=model)
        self.generated_tokens.add(usage.completion_tokens - resumed, model=model)
        reason = usage.cache_reason
        lookups = self.cache_hits if usage.cached_tokens else self.cache_misses
        lookups.add(model=model, reason=UNKNOWN_REASON if reason is None else reason.value)
        self.queue.observe(usage.queue_s, model=model)
        self.load_wait.observe(usage.load_s, model=model)
        gaps = usage.completion_tokens - 1
        if gaps > 0 and not resumed and not usage.migrations:  # else its time is the last worker's
            self.inter_token.observe(usage.completion_s / gaps, times=gaps, model=model)

    def counters(self) -> tuple[Counter, ...]:
        """Return every counter, empty ones too."""
        return tuple(its for its in vars(self).values() if isinstance(its, Counter))

    def histograms(self) -> tuple[Histogram, ...]:
        """Return every histogram, empty ones too."""
        return tuple(its for its in vars(self).values() if isinstance(its, Histogram))
