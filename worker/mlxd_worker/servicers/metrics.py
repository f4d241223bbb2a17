"""The worker's counters of requests, and the gauges of the moment.

Invariants:
- Event loop only. Counters and histograms begin at 0 with the process.
- Every Generate call is counted once, under the status code that its client gets; if the client
  left, or its deadline passed, under CANCELLED.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from mlxd.v1 import status_pb2
from mlxd_shared.ops.metrics import Counter, Histogram, labels
from mlxd_shared.wire.convert_status import counter_to_pb, gauge_to_pb, histogram_to_pb
from mlxd_shared.wire.status import end_code
from mlxd_worker.engine.request import Finished, Tokens
from mlxd_worker.thread.facts import Figures


class RequestRecord:
    """The measurements of one request while it runs."""

    def __init__(self, metrics: WorkerMetrics, model: str) -> None:
        self.finish_reason = ""
        self._metrics = metrics
        self._model = model
        self._last_s = time.monotonic()
        self._offset = 0

    def note(self, event: Tokens | Finished) -> None:
        """Measure one event as it is sent to the client."""
        now_s = time.monotonic()
        metrics, model = self._metrics, self._model
        count = len(event.ids)
        if count:
            metrics.generated_tokens.add(count, model=model)
            if self._offset == 0:
                metrics.first_token_s.observe(now_s - self._last_s, model=model)
            else:
                each_s = (now_s - self._last_s) / count
                metrics.inter_token_s.observe(each_s, times=count, model=model)
            self._last_s = now_s
            self._offset += count
        if isinstance(event, Finished):
            self.finish_reason = event.reason.value
            metrics.queue_s.observe(event.usage.queue_s, model=model)
            metrics.prompt_tokens.add(event.usage.prompt_tokens, model=model)
            metrics.cached_tokens.add(event.usage.cached_tokens, model=model)


class WorkerMetrics:
    """The worker's counters and histograms."""

    def __init__(self) -> None:
        self.requests = Counter(
            "mlxd_requests_total", "Generate calls by model, status code and finish reason."
        )
        self.prompt_tokens = Counter(
            "mlxd_prompt_tokens_total", "Prompt tokens of finished streams, cached ones included."
        )
        self.cached_tokens = Counter(
            "mlxd_cached_tokens_total", "Prompt tokens whose state was reused."
        )
        self.generated_tokens = Counter("mlxd_generation_tokens_total", "Tokens sent to clients.")
        self.first_token_s = Histogram(
            "mlxd_time_to_first_token_seconds", "From the request's arrival to its first token."
        )
        self.inter_token_s = Histogram(
            "mlxd_inter_token_latency_seconds",
            "Time between tokens, shared by those of one message.",
        )
        self.queue_s = Histogram(
            "mlxd_queue_time_seconds", "From the request's arrival to its first prefill."
        )

    @contextmanager
    def request(self, model: str) -> Iterator[RequestRecord]:
        """Count one Generate call, however it ends."""
        record = RequestRecord(self, model)
        code = end_code(None)
        try:
            yield record
        except BaseException as error:
            code = end_code(error)
            raise
        finally:
            self.requests.add(model=model, code=code.name, finish_reason=record.finish_reason)

    def families(self, figures: Figures, model: str) -> list[status_pb2.MetricFamily]:
        """Return all metrics for the wire, gauges as of `figures`."""
        load = figures.load
        gauges = (
            ("mlxd_streams_running", "Streams being decoded or prefilled.", load.running),
            ("mlxd_streams_waiting", "Streams waiting for a row.", load.waiting),
            ("mlxd_oldest_wait_seconds", "Age of the oldest waiting stream.", load.oldest_wait_s),
            ("mlxd_kv_tokens_used", "Tokens held by running rows.", load.kv_tokens_used),
            ("mlxd_kv_tokens_capacity", "Tokens that rows may hold.", load.kv_tokens_capacity),
            ("mlxd_prefix_snapshots", "Open snapshots, lazy or not.", figures.prefix_snapshots),
            (
                "mlxd_speculation_available",
                "1 where the model's caches can take wrong guesses back, otherwise 0.",
                int(figures.can_guess),
            ),
        )
        counters = (self.requests, self.prompt_tokens, self.cached_tokens, self.generated_tokens)
        histograms = (self.first_token_s, self.inter_token_s, self.queue_s)
        return [
            *(counter_to_pb(counter) for counter in counters),
            *(counter_to_pb(counter) for counter in prefix_counters(figures)),
            *(counter_to_pb(counter) for counter in speculation_counters(figures)),
            *(histogram_to_pb(histogram) for histogram in histograms),
            *(gauge_to_pb(name, text, {labels(model=model): v}) for name, text, v in gauges),
        ]


def prefix_counters(figures: Figures) -> tuple[Counter, ...]:
    """Return what the engine has counted about prefix caches, as counters."""
    lookups = Counter("mlxd_prefix_lookups_total", "Prompts looked up, by result and reason.")
    hit_tokens = Counter("mlxd_prefix_hit_tokens_total", "Prompt tokens put back from snapshots.")
    evictions = Counter("mlxd_prefix_evictions_total", "Runs of tokens that had to make room.")
    evicted = Counter("mlxd_prefix_evicted_bytes_total", "Bytes that evicted snapshots owned.")
    from_disk = Counter(
        "mlxd_prefix_disk_hit_tokens_total", "Prompt tokens that were read from disk."
    )
    for model, prefix in figures.prefixes:
        for result, reason, count in prefix.lookups:
            lookups.add(count, model=model, result=result, reason=reason)
        hit_tokens.add(prefix.hit_tokens, model=model)
        evictions.add(prefix.evictions, model=model)
        evicted.add(prefix.evicted_nbytes, model=model)
        from_disk.add(prefix.disk_tokens, model=model)
    return lookups, hit_tokens, evictions, evicted, from_disk


def speculation_counters(figures: Figures) -> tuple[Counter, ...]:
    """Return what the engine has counted about guesses, as counters."""
    drafted = Counter("mlxd_draft_tokens_total", "Guesses that the model has judged.")
    accepted = Counter("mlxd_accepted_draft_tokens_total", "Guesses that were right.")
    for model, guesses in figures.speculations:
        drafted.add(guesses.drafted_tokens, model=model)
        accepted.add(guesses.accepted_tokens, model=model)
    return drafted, accepted
