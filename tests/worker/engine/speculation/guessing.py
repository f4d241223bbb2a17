"""Drafters that know or mistake what comes, and engines whose rows always guess."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mlxd_worker.cache.prefix.prefix import PrefixCache
from mlxd_worker.cache.rows import RowCaches
from mlxd_worker.engine.loop import Engine, Limits, MakeDecoder
from mlxd_worker.engine.speculation.depth import WIDTHS, DepthController
from mlxd_worker.engine.speculation.drafts import AGREED_MAX, Drafter, Guess, PromptLookup
from mlxd_worker.engine.speculation.speculator import SpeculationCounts, Speculator
from mlxd_worker.engine.stepping.choose import main_road, way_of
from mlxd_worker.models.base import Model
from mlxd_worker.text.tokenizer import Tokenizer
from tests.support.engines import TinyEngine

DEPTH = 15
MakeTestDrafter = Callable[[Sequence[int]], Drafter]


class Oracle:
    """Implements Drafter: proposes what it was told comes, some of it wrong on purpose."""

    def __init__(
        self, prompt: Sequence[int], follows: Sequence[int], *, wrong: float = 0.0, seed: int = 0
    ) -> None:
        self._follows = follows
        self._wrong = wrong
        self._seed = seed
        self._at = 0
        del prompt

    def push(self, token_id: int) -> None:
        """Go one token further, whatever it is."""
        self._at += 1

    def guess(self, depth_max: int) -> Guess | None:
        """Return what follows, each token wrong with the chance given, at most `depth_max`."""
        draws = random.Random(f"{self._seed} {self._at}")
        tokens = tuple(
            token + 1 if draws.random() < self._wrong else token
            for token in self._follows[self._at : self._at + depth_max]
        )
        return Guess(tokens, AGREED_MAX) if tokens else None


def drafter_for(
    follows: Mapping[tuple[int, ...], Sequence[int]], *, wrong: float = 0.0
) -> MakeTestDrafter:
    """Return what makes an Oracle for each prompt that it knows, and a look-up for any other."""

    def make(prompt: Sequence[int]) -> Drafter:
        known = follows.get(tuple(prompt))
        if known is None:
            return PromptLookup(prompt)
        return Oracle(prompt, known, wrong=wrong, seed=len(prompt))

    return make


def eager(widths: Sequence[int] = WIDTHS) -> DepthController:
    """Return a controller that knows all widths, and that none of them costs anything."""
    controller = DepthController(widths=widths)
    for width in widths:
        controller.learn_pass(1, width, 0.0)
    return controller


def guessing_engine(
    model: Model,
    tokenizer: Tokenizer,
    *,
    make_drafter: MakeTestDrafter = PromptLookup,
    controller: DepthController | None = None,
    counts: SpeculationCounts | None = None,
    make_decoder: MakeDecoder | None = None,
    depth: int = DEPTH,
    rows_max: int = 4,
    context_length: int = 512,
    chunk: int = 64,
    prefix_nbytes: int = 0,
    bounded_shapes: bool | None = None,
    **caches_options: Any,
) -> TinyEngine:
    """Return an engine with caches of its own whose rows guess whenever they can.

    Its clock stands still, so that no step costs anything.
    """
    caches = RowCaches(
        model.new_caches(**caches_options),
        context_max=context_length,
        rows_max=rows_max,
        bounded_shapes=bounded_shapes,
        keeps_spares=True,
    )
    prefix = PrefixCache(caches, budget_nbytes=prefix_nbytes)
    way = way_of(model.capabilities, caches)
    plain = stepper = main_road(model, caches, way)
    if way.guesses:
        stepper = Speculator(
            model,
            caches,
            plain,
            clock=lambda: 0.0,
            depth_default=depth,
            make_drafter=make_drafter,
            controller=controller or eager(),
            counts=counts,
        )
    engine = Engine(
        model,
        caches,
        make_decoder or (lambda _: tokenizer.detokenizer(skip_special=False)),
        Limits(context_length=context_length, rows_max=rows_max, prefill_chunk_tokens=chunk),
        prefix=prefix,
        stepper=stepper,
        clock=lambda: 0.0,
    )
    return TinyEngine(engine, caches, tokenizer, prefix, plain)
