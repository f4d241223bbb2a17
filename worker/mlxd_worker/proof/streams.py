"""Greedy streams through the whole engine: what two ways of stepping must agree on."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from mlxd_shared.domain.requests import Sampling
from mlxd_worker.cache.rows import RowCaches
from mlxd_worker.engine.loop import Engine, Limits
from mlxd_worker.engine.request import Event, Failed, PositionLogprobs, Sink, StreamId, Submit
from mlxd_worker.engine.stepping.choose import choose, compile_steps, writes_in_place
from mlxd_worker.models.base import Model, Passes
from mlxd_worker.proof.subjects import Subject

CONTEXT: Final = 512
LENGTHS: Final = (5, 64, 33, 40)
"""Of the prompts."""
FIRST: Final = 2
"""So many streams decode already when the others come: their prompts go along, or together."""
TOKENS: Final = 12
_GREEDY: Final = Sampling(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0)


class StreamFailed(Exception):
    """A stream ended with an error where none may."""


class _NoText:
    """Implements TextDecoder for models without a tokenizer."""

    def push(self, token_id: int) -> str:
        """Complete no character."""
        del token_id
        return ""

    def finish(self) -> str:
        """Hold nothing back."""
        return ""


@dataclass(slots=True)
class Heard(Sink):
    """A stream's sink, and what came."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[PositionLogprobs] = field(default_factory=list)

    def put(self, event: Event) -> None:
        """Take an event."""
        if isinstance(event, Failed):
            raise StreamFailed(str(event.error))
        self.ids += event.ids
        self.logprobs += event.logprobs

    @property
    def margins(self) -> list[float]:
        """By how much the best token's log-probability is above the second's, at each place."""
        return [each.top[0].logprob - each.top[1].logprob for each in self.logprobs]


class Streams:
    """An engine of its own on one model."""

    def __init__(self, model: Model, subject: Subject, *, rows: int = 4) -> None:
        """Make the engine, as a load would."""
        caches = RowCaches(
            model.new_caches(),
            context_max=CONTEXT,
            rows_max=rows,
            keeps_spares=True,
            in_place=writes_in_place(model, subject.kind),
        )
        passes: Passes = compile_steps(model, caches, subject.kind) or model
        limits = Limits(context_length=CONTEXT, rows_max=rows)
        stepper = choose(passes, caches)
        self._engine = Engine(passes, caches, lambda _: _NoText(), limits, stepper=stepper)
        self._count = 0

    def submit(self, prompt: tuple[int, ...], *, margins: bool = False, resumed: int = 0) -> Heard:
        """Submit a stream.

        margins: keep its log-probabilities, for which no step runs ahead. resumed: how many of the
        prompt's last tokens count as output.
        """
        heard = Heard()
        self._count += 1
        request = Submit(
            stream=StreamId(self._count),
            prompt=prompt,
            sampling=_GREEDY,
            max_tokens=TOKENS,
            submitted_s=time.monotonic(),
            sink=heard,
            top_logprobs=2 if margins else None,
            resumed=resumed,
        )
        self._engine.submit(request)
        return heard

    def run(self) -> None:
        """Step until all streams have ended."""
        while self._engine.busy:
            self._engine.step()

    def step_until(self, heard: Sequence[Heard]) -> None:
        """Step until each of these has a token."""
        while self._engine.busy and not all(each.ids for each in heard):
            self._engine.step()


def prompts_of(vocab: int, lengths: Sequence[int] = LENGTHS) -> list[tuple[int, ...]]:
    """Return random prompts, the same ones each time."""
    draws = random.Random(17)  # noqa: S311 - no secret
    return [tuple(draws.randrange(vocab) for _ in range(length)) for length in lengths]


def run_company(subject: Subject, *, margins: bool = False) -> list[Heard]:
    """Run streams side by side, the last of which come while the first decode."""
    model = subject.make()
    streams, engine = prompts_of(model.vocab_size), Streams(model, subject)
    heard = [engine.submit(each, margins=margins) for each in streams[:FIRST]]
    engine.step_until(heard)
    heard += [engine.submit(each, margins=margins) for each in streams[FIRST:]]
    engine.run()
    return heard


def run_alone(subject: Subject, *, margins: bool = False) -> list[Heard]:
    """Run the same streams one after another."""
    model = subject.make()
    engine, heard = Streams(model, subject), []
    for each in prompts_of(model.vocab_size):
        heard.append(engine.submit(each, margins=margins))
        engine.run()
    return heard


def run_resumed(subject: Subject, before: Sequence[Heard]) -> list[Heard]:
    """Run the same streams from their middles on, as after a worker that died."""
    model = subject.make()
    engine, heard = Streams(model, subject), []
    for each, former in zip(prompts_of(model.vocab_size), before, strict=True):
        cut = len(former.ids) // 2
        heard.append(engine.submit((*each, *former.ids[:cut]), resumed=cut))
        engine.run()
        heard[-1].ids[:0] = former.ids[:cut]
    return heard
