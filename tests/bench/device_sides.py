"""The two sides of the comparison on a GPU: our engine and mlx-lm's loops, step by step.

A step counts while every row decodes and no prompt is being read; its time is what the host sees
between two tokens of a row.
"""

from __future__ import annotations

import importlib
import time
from dataclasses import dataclass, field
from typing import Any, Protocol

import mlx.core as mx

from mlxd_shared.domain.requests import Sampling
from mlxd_worker.cache.rows import RowCaches
from mlxd_worker.engine.loop import Engine, Limits
from mlxd_worker.engine.request import Event, Failed, Sink, StreamId, Submit
from mlxd_worker.engine.stepping.choose import choose
from mlxd_worker.engine.stepping.compiled import CompiledModel
from mlxd_worker.models.base import Model, Passes

GREEDY = Sampling(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0)


@dataclass(slots=True)
class Measured:
    """The steps of one round, the most that was held meanwhile, and what the last row said."""

    steps_s: list[float] = field(default_factory=list)
    peak_nbytes: int = 0
    ids: list[int] = field(default_factory=list)


class Side(Protocol):
    """Something that decodes rows side by side."""

    def run(self, prompts: list[list[int]], *, steps: int) -> Measured:
        """Decode until `steps` steps count; at most a few more."""
        ...


class NoText:
    """Decodes ids into nothing: a random model says nothing."""

    def push(self, token_id: int) -> str:
        """Take an id."""
        del token_id
        return ""

    def finish(self) -> str:
        """End."""
        return ""


@dataclass(slots=True)
class Kept(Sink):
    """Keeps the ids of one stream."""

    ids: list[int] = field(default_factory=list)

    def put(self, event: Event) -> None:
        """Take an event."""
        if isinstance(event, Failed):
            raise event.error
        self.ids += event.ids


class Ours:
    """The worker's engine on its own."""

    def __init__(self, model: Model, *, rows_max: int, context: int, compiled: bool) -> None:
        """Make the caches and the engine for `model`."""
        self.caches = RowCaches(
            model.new_caches(context_max=context),
            context_max=context,
            rows_max=rows_max,
            in_place=compiled and model.capabilities.decodes_in_place,
        )
        self.model: Passes = CompiledModel(model, self.caches) if compiled else model
        self.engine = Engine(
            self.model,
            self.caches,
            lambda skip: NoText(),
            Limits(context_length=context, rows_max=rows_max),
            stepper=choose(self.model, self.caches),
        )

    def run(self, prompts: list[list[int]], *, steps: int) -> Measured:
        """Serve the prompts until enough steps count; then let them go."""
        mx.reset_peak_memory()
        sinks = [Kept() for _ in prompts]
        for number, (prompt, sink) in enumerate(zip(prompts, sinks, strict=True)):
            self._submit(number, prompt, sink)
        measured = Measured()
        while self.engine.busy and len(measured.steps_s) < steps:
            before = [len(sink.ids) for sink in sinks]
            started_s = time.perf_counter()
            self.engine.step()
            took_s = time.perf_counter() - started_s
            if all(len(s.ids) > n > 0 for s, n in zip(sinks, before, strict=True)):
                measured.steps_s.append(took_s)
        for number in range(len(prompts)):
            self.engine.cancel(StreamId(number))
        measured.peak_nbytes = mx.get_peak_memory()
        measured.ids = sinks[-1].ids
        mx.clear_cache()
        return measured

    def _submit(self, number: int, prompt: list[int], sink: Kept) -> None:
        self.engine.submit(
            Submit(
                stream=StreamId(number),
                prompt=tuple(prompt),
                sampling=GREEDY,
                max_tokens=None,
                stop=(),
                stop_token_ids=frozenset(),
                eos_ids=frozenset(),
                skip_special_tokens=True,
                submitted_s=time.monotonic(),
                sink=sink,
            )
        )


class PeerLoop:
    """mlx-lm's loop for one stream, without its text."""

    def __init__(self, model: Any) -> None:
        """Decode with `model`."""
        self._model = model
        self._generate = importlib.import_module("mlx_lm.generate").generate_step

    def run(self, prompts: list[list[int]], *, steps: int) -> Measured:
        """Decode the one prompt."""
        (prompt,) = prompts
        mx.reset_peak_memory()
        measured = Measured()
        last_s = None
        for token, _ in self._generate(mx.array(prompt), self._model, max_tokens=steps + 1):
            now_s = time.perf_counter()
            if last_s is not None:
                measured.steps_s.append(now_s - last_s)
            last_s = now_s
            measured.ids.append(int(token))
        measured.peak_nbytes = mx.get_peak_memory()
        mx.clear_cache()
        return measured


class PeerBatches:
    """mlx-lm's continuous batching."""

    def __init__(self, model: Any) -> None:
        """Decode with `model`."""
        self._model = model
        self._batches = importlib.import_module("mlx_lm.generate").BatchGenerator

    def run(self, prompts: list[list[int]], *, steps: int) -> Measured:
        """Serve the prompts until enough steps count."""
        rows = len(prompts)
        mx.reset_peak_memory()
        generator = self._batches(self._model, stop_tokens=[], completion_batch_size=rows)
        # Rows join eight at a time: the first go on while the last are read.
        uids = generator.insert(prompts, [steps + 2 * rows] * rows)
        measured = Measured()
        while len(measured.steps_s) < steps:
            started_s = time.perf_counter()
            read, generated = generator.next()
            took_s = time.perf_counter() - started_s
            if len(generated) == rows and not read:
                measured.steps_s.append(took_s)
            measured.ids += [int(r.token) for r in generated if r.uid == uids[-1]]
        generator.remove(uids)
        generator.close()
        measured.peak_nbytes = mx.get_peak_memory()
        mx.clear_cache()
        return measured
