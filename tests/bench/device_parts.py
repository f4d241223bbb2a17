"""Where a decode step's time goes on a GPU: the memory floor, parts by leaving them out, run-ahead.

Parts are differences of whole steps: a step, one without attention, and the head alone; each read
before the next one is dispatched, and dispatched ahead, where the device hardly waits for the host.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import mlx.core as mx

from mlxd_worker.cache.arenas.plan import StepPlan
from mlxd_worker.cache.base import LayerCache, RowId
from mlxd_worker.cache.layers.attention import Asked
from mlxd_worker.cache.layers.kv import KVCache
from mlxd_worker.cache.rows import RowCaches
from mlxd_worker.engine.stepping.compiled import CompiledModel
from mlxd_worker.models.base import Batch, Model, Passes

COPY_NBYTES = 4 << 30
PROMPT_CHUNK = 512
WARM_STEPS = 4


def copy_bytes_per_s(nbytes: int = COPY_NBYTES) -> float:
    """Return how many bytes a second a large array is read and written with, both counted."""
    source = mx.random.randint(0, 100, (nbytes // 4,), dtype=mx.int32)
    mx.eval(source)

    def once() -> None:
        mx.eval(source + 1)

    return 2 * nbytes / min(times_s(once, repeats=20))


def times_s(run: Callable[[], None], *, repeats: int) -> list[float]:
    """Return how long `run` takes each time, after two untimed ones."""
    times = []
    for number in range(repeats + 2):
        started_s = time.perf_counter()
        run()
        if number > 1:
            times.append(time.perf_counter() - started_s)
    return times


class WithoutAttention(KVCache):
    """Gives the queries back: nothing is written, nothing read."""

    def attend(self, inputs: Asked) -> mx.array:
        """Return the queries; of a prompt too."""
        return inputs.queries

    def attend_joined(
        self, joined: mx.array, periods: mx.array, plan: StepPlan, *, heads: int, scale: float
    ) -> mx.array:
        """Return the queries."""
        del periods, plan, scale
        return joined[:, : heads * self.head_dim]


class Decoder:
    """Decodes rows of equal length without an engine: the model's pass, the head, the largest."""

    def __init__(
        self, model: Model, layers: Sequence[LayerCache | None], *, rows: int, context: int
    ) -> None:
        """Make caches of `layers` for so many rows; nothing is in them."""
        self.caches = RowCaches(layers, context_max=context, rows_max=rows)
        self.model: Passes = CompiledModel(model, self.caches)
        self._ids = [RowId(number) for number in range(rows)]
        self._length = 0

    def fill(self, tokens: int) -> None:
        """Give every row `tokens` tokens."""
        for row in self._ids:
            while not self.caches.join(row, tokens=tokens + 1):
                self.caches.tend()
            for start in range(0, tokens, PROMPT_CHUNK):
                ids = [1] * min(PROMPT_CHUNK, tokens - start)
                self.model.forward(Batch.prefill(ids, start, row), self.caches)
                mx.eval(self.caches.state())
        while self.caches.table.moving:
            self.caches.tend()
        self._length = tokens

    def steps_s(self, steps: int, *, ahead: bool) -> list[float]:
        """Return the time between tokens; `ahead` dispatches a step before the last is read."""
        times = []
        drawn = self._dispatch([1] * len(self._ids))
        last_s = time.perf_counter()
        for number in range(steps + WARM_STEPS):
            if ahead:
                following = self._dispatch(drawn)
                mx.eval(drawn)
                drawn = following
            else:
                mx.eval(drawn, self.caches.state())
                drawn = self._dispatch([int(token) for token in _numbers(drawn)])
            now_s = time.perf_counter()
            if number >= WARM_STEPS:
                times.append(now_s - last_s)
            last_s = now_s
        mx.eval(drawn, self.caches.state())
        return times

    def _dispatch(self, tokens: mx.array | list[int]) -> mx.array:
        rows = [row for row in self.caches.rows if row in self._ids]
        self.caches.reserve_all(dict.fromkeys(rows, self._length + 1))
        batch = Batch.decode(tokens, [self._length] * len(rows), rows)
        drawn = mx.argmax(self.model.logits(self.model.forward(batch, self.caches)), axis=-1)
        mx.async_eval(drawn, self.caches.state())  # type: ignore[no-untyped-call]
        self._length += 1
        return drawn


def logits_difference(model: Model, *, rows: int, length: int, steps: int, context: int) -> float:
    """Return how far a compiled step's logits are from the model's own pass, in deviations.

    Rows of different lengths, fed the same tokens; the largest difference over the standard
    deviation of all logits.
    """
    sides_logits: list[mx.array] = []
    for compiled in (False, True):
        caches = RowCaches(
            model.new_caches(context_max=context), context_max=context, rows_max=rows
        )
        used: Passes = CompiledModel(model, caches) if compiled else model
        lengths = {RowId(number): length + 3 * number for number in range(rows)}
        for row, tokens in lengths.items():
            while not caches.join(row, tokens=tokens + steps):
                caches.tend()
            for start in range(0, tokens, PROMPT_CHUNK):
                ids = [(7 * p + row) % 509 for p in range(start, min(start + PROMPT_CHUNK, tokens))]
                used.forward(Batch.prefill(ids, start, row), caches)
                mx.eval(caches.state())
        while caches.table.moving:
            caches.tend()
        logits_by_step: list[mx.array] = []
        for step in range(steps):
            offsets = [lengths[row] + step for row in caches.rows]
            tokens_now = [(11 * step + row) % 509 for row in caches.rows]
            logits = used.logits(
                used.forward(Batch.decode(tokens_now, offsets, caches.rows), caches)
            )
            mx.eval(logits, caches.state())
            logits_by_step.append(logits)
        sides_logits.append(mx.stack(logits_by_step))
    plain, fast = sides_logits
    largest: Any = (mx.max(mx.abs(plain - fast)) / mx.std(plain)).item()
    return float(largest)


def _numbers(array: mx.array) -> Iterable[Any]:
    values: Any = array.tolist()
    return values if isinstance(values, list) else [values]


def step_s(
    model: Model,
    layers: Sequence[LayerCache | None],
    *,
    rows: int,
    length: int,
    steps: int,
    context: int,
    ahead: bool = False,
) -> tuple[float, int]:
    """Return the median step of rows of `length` tokens, and what was held at most meanwhile."""
    decoder = Decoder(model, layers, rows=rows, context=context)
    decoder.fill(length)
    mx.clear_cache()
    mx.reset_peak_memory()
    median = statistics.median(decoder.steps_s(steps, ahead=ahead))
    peak_nbytes = mx.get_peak_memory()
    for row in list(decoder.caches.rows):
        decoder.caches.leave(row)
    mx.clear_cache()
    return median, peak_nbytes
