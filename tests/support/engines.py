"""Engines on tiny models inside the test process, and sinks that remember."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from mlxd_models.sizes.weight_forms import FloatType
from mlxd_shared.domain.requests import FinishReason, KVFormat, Sampling
from mlxd_worker.cache.disk.prefixes import PrefixDisk
from mlxd_worker.cache.prefix.prefix import PrefixCache
from mlxd_worker.cache.rows import RowCaches
from mlxd_worker.engine.gallery import Gallery
from mlxd_worker.engine.loop import Engine, Limits, MakeDecoder
from mlxd_worker.engine.request import (
    Event,
    Failed,
    Finished,
    PositionLogprobs,
    Sink,
    StreamId,
    Submit,
    Tell,
)
from mlxd_worker.engine.speculation.depth import DepthController
from mlxd_worker.engine.speculation.speculator import Speculator
from mlxd_worker.engine.stepping.base import Stepper
from mlxd_worker.engine.stepping.choose import main_road, way_of
from mlxd_worker.engine.stepping.joined import Joined
from mlxd_worker.models.base import JoiningPasses, Model, Passes
from mlxd_worker.models.loader import inspect_model, load_model
from mlxd_worker.text.tokenizer import Tokenizer
from mlxd_worker.tokenizing.files import load_tokenizer

GREEDY = Sampling(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0)
STEPS_MAX = 5000
MakeDisk = Callable[[RowCaches], PrefixDisk]
_streams = itertools.count(1)


@dataclass(slots=True)
class Collected(Sink):
    """A sink that keeps every event."""

    events: list[Event] = field(default_factory=list)

    def put(self, event: Event) -> None:
        """Keep it."""
        self.events.append(event)

    @property
    def ids(self) -> list[int]:
        """All token ids, in order."""
        return [i for event in self.events if not isinstance(event, Failed) for i in event.ids]

    @property
    def drawn(self) -> list[int]:
        """All token ids, and the one that ended the stream and is not part of its output."""
        last = self.events[-1] if self.events else None
        ending = last.stop_token_id if isinstance(last, Finished) else None
        return self.ids if ending is None else [*self.ids, ending]

    @property
    def logprobs(self) -> list[PositionLogprobs]:
        """All log-probabilities, in order."""
        events = [event for event in self.events if not isinstance(event, Failed)]
        return [entry for event in events for entry in event.logprobs]

    @property
    def text(self) -> str:
        """All text."""
        return "".join(event.text for event in self.events if not isinstance(event, Failed))

    @property
    def ended(self) -> bool:
        """Whether the stream has had its end."""
        return bool(self.events) and isinstance(self.events[-1], Finished | Failed)

    @property
    def guessed(self) -> int:
        """How many of the tokens were guessed; known of a stream that has finished."""
        last = self.events[-1] if self.events else None
        return last.usage.accepted_draft_tokens if isinstance(last, Finished) else 0

    @property
    def reused(self) -> int:
        """How many prompt tokens were not evaluated; known of a stream that has finished."""
        last = self.events[-1] if self.events else None
        return last.usage.cached_tokens if isinstance(last, Finished) else 0

    @property
    def outcome(self) -> str:
        """How the stream ended: why, or what its client is told."""
        last = self.events[-1]
        return str(last.error) if isinstance(last, Failed) else self.reason.value

    @property
    def finished(self) -> Finished:
        """The stream's good end."""
        last = self.events[-1]
        assert isinstance(last, Finished), last
        return last

    @property
    def reason(self) -> FinishReason:
        """Why the stream ended."""
        return self.finished.reason


class Owed(Collected):
    """A sink that asks what it is owed when it is to, or before anything else."""

    def __init__(self) -> None:
        super().__init__()
        self.tell: Tell | None = None

    def owe(self, tell: Tell) -> None:
        """Ask later."""
        self.ask()
        self.tell = tell

    def ask(self) -> None:
        """Keep what is owed."""
        tell, self.tell = self.tell, None
        self.events += () if tell is None else tell()

    def put(self, event: Event) -> None:
        """Keep it behind what is owed."""
        self.ask()
        self.events.append(event)


@dataclass(slots=True)
class TinyEngine:
    """An engine, its caches and tokenizer, and short ways to use them."""

    engine: Engine
    caches: RowCaches
    tokenizer: Tokenizer
    prefix: PrefixCache
    plain: Stepper
    """What steps its rows where none guesses."""

    def rest(self) -> None:
        """Give back the arenas that an idle engine keeps for rows to come; then it holds none."""
        assert self.caches.rows == ()
        self.caches.rest()
        assert self.caches.nbytes == 0

    def submit(
        self, prompt: Iterable[int], *, sink: Collected | None = None, **options: Any
    ) -> tuple[Submit, Collected]:
        """Submit a greedy stream of 8 tokens unless told otherwise; return it and its sink."""
        collected = sink or Collected()
        values: dict[str, Any] = {
            "sampling": GREEDY,
            "max_tokens": 8,
            "stop": (),
            "stop_token_ids": frozenset(),
            "eos_ids": frozenset(),
            "skip_special_tokens": False,
            "submitted_s": time.monotonic(),
        }
        request = Submit(
            stream=StreamId(next(_streams)),
            prompt=tuple(prompt),
            sink=collected,
            **{**values, **options},
        )
        self.engine.submit(request)
        return request, collected

    def run(self) -> None:
        """Step until nothing is left to do."""
        for _ in range(STEPS_MAX):
            if not self.engine.busy:
                return
            self.engine.step()
        raise AssertionError("the engine does not come to an end")

    def alone(self, prompt: Iterable[int], **options: Any) -> Collected:
        """Run one stream to its end and return what it got."""
        _, sink = self.submit(prompt, **options)
        self.run()
        return sink


def tiny_engine(
    folder: Path,
    *,
    rows_max: int = 4,
    context_length: int = 512,
    waiting_max: int = 64,
    chunk: int = 64,
    clock: Callable[[], float] = time.monotonic,
    make_decoder: MakeDecoder | None = None,
    prefix_nbytes: int = 0,
    keeps_spares: bool = True,
    kv: KVFormat = KVFormat.MODEL,
    make_disk: MakeDisk | None = None,
) -> TinyEngine:
    """Return an engine on the model in `folder`; its text is the tokenizer's by default.

    `prefix_nbytes`: what snapshots of former prompts may take; by default none are kept.
    `keeps_spares`: decode in arenas that former rows have left, as a worker does. `make_disk`:
    makes what keeps blocks of prompts; the caller closes it.
    """
    model = load_model(inspect_model(folder), form=FloatType.F32, progress=lambda *_: None)
    return engine_on(
        model,
        load_tokenizer(folder),
        rows_max=rows_max,
        context_length=context_length,
        waiting_max=waiting_max,
        chunk=chunk,
        clock=clock,
        make_decoder=make_decoder,
        prefix_nbytes=prefix_nbytes,
        keeps_spares=keeps_spares,
        kv=kv,
        make_disk=make_disk,
    )


def engine_on(
    model: Model,
    tokenizer: Tokenizer,
    *,
    rows_max: int,
    context_length: int,
    waiting_max: int = 64,
    chunk: int = 64,
    clock: Callable[[], float] = time.monotonic,
    make_decoder: MakeDecoder | None = None,
    prefix_nbytes: int = 0,
    keeps_spares: bool = True,
    kv: KVFormat = KVFormat.MODEL,
    make_disk: MakeDisk | None = None,
    controller: DepthController | None = None,
    make_plain: Callable[[Passes, RowCaches], Stepper] | None = None,
    gallery: Gallery | None = None,
) -> TinyEngine:
    """Return an engine with caches of its own on a model that others may use, too.

    `controller` says how wide the steps are in which rows guess that are asked to; `make_plain`
    makes what steps the others, prompts apart, as a load chooses it by default.
    """
    caches = RowCaches(
        model.new_caches(kv=kv),
        context_max=context_length,
        rows_max=rows_max,
        keeps_spares=keeps_spares,
    )
    limits = Limits(
        context_length=context_length,
        rows_max=rows_max,
        waiting_max=waiting_max,
        prefill_chunk_tokens=chunk,
    )
    disk = None if make_disk is None else make_disk(caches)
    prefix = PrefixCache(caches, budget_nbytes=prefix_nbytes, disk=disk)
    way = way_of(model.capabilities, caches)
    plain = main_road(model, caches, way)
    stepper = plain
    if make_plain is not None:
        plain = make_plain(model, caches)
        stepper = joined_as_chosen(model, caches, plain)
    if way.guesses:
        stepper = Speculator(
            model, caches, stepper, clock=clock, depth_default=0, controller=controller
        )
    engine = Engine(
        model,
        caches,
        make_decoder
        or (
            lambda request: tokenizer.detokenizer(
                skip_special=request.skip_special_tokens,
                anchored=request.anchored,
                shown=request.shown,
            )
        ),
        limits,
        prefix=prefix,
        stepper=stepper,
        clock=clock,
        gallery=gallery,
    )
    return TinyEngine(engine, caches, tokenizer, prefix, plain)


def joined_as_chosen(model: Passes, caches: RowCaches, plain: Stepper) -> Stepper:
    """Return `plain`, which takes prompts along where a load would have chosen that."""
    if not way_of(model.capabilities, caches).joins:
        return plain
    return Joined(cast("JoiningPasses", model), caches, plain)
