"""What the controller counts. One owner: the event loop's thread; names as Prometheus has them."""

from __future__ import annotations

from mlxd_shared.ops.metrics import Counter, Histogram

AGE_BOUNDS_S = (1.0, 10.0, 60.0, 300.0, 900.0, 3600.0, 4 * 3600.0, 86_400.0, 7 * 86_400.0)


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

    def families(self) -> tuple[Counter | Histogram, ...]:
        """Return every counter, then every histogram, empty ones too."""
        return tuple(vars(self).values())
