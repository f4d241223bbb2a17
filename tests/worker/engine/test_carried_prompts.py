"""Prompts go along in the pass of the step that is made up ahead; no stream's tokens change."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlxd_worker.cache.arenas.plan import PassCaches
from mlxd_worker.cache.rows import RowCaches
from mlxd_worker.engine.request import Image, StreamId
from mlxd_worker.engine.stepping.compiled import CompiledModel
from mlxd_worker.models.base import Batch, Model
from tests.support.clocks import Clock
from tests.support.counting import calls_of
from tests.support.engines import GREEDY, Collected
from tests.worker.engine.test_joining_ahead import (
    CONTEXT,
    LONG,
    ROWS_MAX,
    Served,
    alone,
    prompt_of,
)
from tests.worker.in_place import compiled_in_place
from tests.worker.tiny import config_with, load, write_model

QUICK_S = 1e-6
"""What a look at the clock takes: then a pass may have all that waits."""
SLOW_S = 2e-2
"""Then prompts go by in the smallest pieces."""
PROGRAMS = 30
IMAGE = Image(b"seen", start=2, tokens=4, pixels=b"", grid=(2, 2))


@pytest.fixture(autouse=True)
def _traced_each_time() -> Iterator[None]:
    """Run what would be compiled as it is written: a CPU's compiler is not what is tested."""
    mx.disable_compile()
    yield
    mx.enable_compile()


@pytest.fixture(scope="module", name="model")
def _model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return load(write_model(tmp_path_factory.mktemp("model"), config_with()))


def serve(model: Model, *, each_s: float = QUICK_S, most: int | None = None) -> Served:
    """Return an engine as a GPU would run it; most: tokens that a pass in place may have."""
    passes, caches = compiled_in_place(model, context_max=CONTEXT, rows_max=ROWS_MAX)
    if most is not None:
        passes.capabilities = replace(passes.capabilities, prompts_in_place=most)
    return Served(passes, caches, clock=Clock(tick_s=each_s))


def begin(served: Served, **options: Any) -> Collected:
    """Return a stream of which a step is ahead."""
    sink = served.submit(prompt_of(1, 4), **options)
    while not served.stepper.ahead:
        served.engine.step()
    return sink


def passes_of(act: Callable[[], object]) -> int:
    """Return how many passes over the model an action dispatches."""
    return calls_of(act, CompiledModel.forward)


def test_prompts_go_along_with_the_step_ahead(model: Model) -> None:
    """One pass, with one prompt or with three; each has its first token from the next step."""
    served = serve(model)
    first = begin(served, max_tokens=30)
    prompts = [prompt_of(number, 5 + 11 * number) for number in (2, 3, 4)]
    sinks = [served.submit(prompt) for prompt in prompts[:1]]
    assert passes_of(served.engine.step) == 1
    sinks += [served.submit(prompt) for prompt in prompts[1:]]
    assert passes_of(served.engine.step) == 1
    assert served.stepper.ahead
    assert [len(sink.ids) for sink in sinks] == [1, 0, 0]
    assert passes_of(served.engine.step) == 1
    assert [len(sink.ids) for sink in sinks] == [2, 1, 1]

    served.finish()
    assert first.ids == alone(model, prompt_of(1, 4), max_tokens=30)
    for sink, prompt in zip(sinks, prompts, strict=True):
        assert sink.ids == alone(model, prompt)


def test_what_is_drawn_by_a_seed_is_the_same(model: Model) -> None:
    """A stream's first draw is its first, whichever pass it comes from."""
    served = serve(model)
    begin(served, max_tokens=30)
    prompt, drawn = prompt_of(2, 20), replace(GREEDY, temperature=1.0, seed=7)
    sink = served.submit(prompt, sampling=drawn)
    assert passes_of(served.engine.step) == 1
    served.finish()
    assert sink.ids == alone(model, prompt, sampling=drawn)


def test_a_prompt_goes_along_piece_by_piece(model: Model) -> None:
    """Where there is time for a few tokens a step, no step has a pass more."""
    served = serve(model, each_s=SLOW_S)
    first = begin(served, max_tokens=40)
    prompt = prompt_of(2, 100)
    sink = served.submit(prompt)

    steps = 0
    while not sink.ids:
        assert passes_of(served.engine.step) == 1
        assert not served.engine._prefill._coming
        steps += 1
    assert steps > 2
    served.finish()
    assert sink.ids == alone(model, prompt)
    assert first.ids == alone(model, prompt_of(1, 4), max_tokens=40)


def test_what_one_pass_in_place_cannot_have_goes_before_it(model: Model) -> None:
    """A prompt of as many tokens as a pass may have leaves no room for the row's."""
    served = serve(model, most=64)
    first = begin(served, max_tokens=30)
    fits, fills = prompt_of(2, 60), prompt_of(3, 65)
    sinks = [served.submit(fits)]
    assert passes_of(served.engine.step) == 1
    served.engine.step()
    sinks.append(served.submit(fills))
    assert passes_of(served.engine.step) == 2
    assert served.stepper.ahead

    served.finish()
    assert first.ids == alone(model, prompt_of(1, 4), max_tokens=30)
    assert [sink.ids for sink in sinks] == [alone(model, prompt) for prompt in (fits, fills)]


@pytest.mark.parametrize(("tokens", "passes"), [(128, 1), (501, 1), (512, 2), (513, 2)])
def test_a_prompt_that_fills_a_pass_goes_before_the_step_s(
    model: Model, tokens: int, passes: int
) -> None:
    """A large one, that is: with one token more it would be computed as half as large again."""
    served = serve(model)
    begin(served, max_tokens=30)
    prompt = prompt_of(2, tokens)
    sink = served.submit(prompt)
    assert passes_of(served.engine.step) == passes
    served.finish()
    assert sink.ids == alone(model, prompt)


def test_a_prompt_is_read_though_no_step_follows(model: Model) -> None:
    """The only row draws its last token as the prompt comes: nothing is made up ahead."""
    served = serve(model)
    first = begin(served, max_tokens=3)
    while len(first.ids) < 2:
        served.engine.step()
    prompt = prompt_of(2, 20)
    sink = served.submit(prompt)
    assert passes_of(served.engine.step) == 1
    assert first.reason is not None
    (row,) = served.engine._rows.values()
    assert row.decoding
    served.finish()
    assert sink.ids == alone(model, prompt)


@pytest.mark.parametrize(
    "options", [{"top_logprobs": 1}, {"prompt_logprobs": 1}], ids=["drawn", "prompt's"]
)
def test_prompts_that_are_looked_after_have_passes_of_their_own(
    model: Model, options: dict[str, Any]
) -> None:
    """What the host must see of a row cannot wait for the step ahead."""
    served = serve(model)
    begin(served, max_tokens=30)
    prompt = prompt_of(2, 20)
    sink = served.submit(prompt, **options)
    assert passes_of(served.engine.step) > 1
    served.finish()
    assert sink.ids == alone(model, prompt)


def test_a_prompt_is_read_though_the_step_cannot_be_ahead(model: Model) -> None:
    """A row that joins it has to be looked after: then the prompt has a pass of its own."""
    served = serve(model)
    first = begin(served, max_tokens=30)
    seen = served.submit((5,), top_logprobs=1)
    prompt = prompt_of(2, 20)
    sink = served.submit(prompt)
    served.engine.step()
    assert len(seen.ids) == 1
    assert all(row.decoding for row in served.engine._rows.values())
    served.finish()
    assert sink.ids == alone(model, prompt)
    assert seen.ids == alone(model, (5,))
    assert first.ids == alone(model, prompt_of(1, 4), max_tokens=30)


def test_a_prompt_behind_an_image_has_a_pass_of_its_own(model: Model) -> None:
    """What is left of it stands elsewhere for rotations than at its positions."""
    served = serve(model)
    begin(served, max_tokens=30)
    served.submit(prompt_of(2, 20))
    served.engine._admit()
    row = served.engine._rows[StreamId(2)]
    company = [(row, row.next_chunk(20))]
    prefill = served.engine._prefill
    assert prefill._goes_along(company)
    row.request = replace(row.request, images=(IMAGE,))
    row.offset = IMAGE.stop
    assert not prefill._goes_along(company)


class Timed(CompiledModel):
    """A model whose passes move a clock: so much each, and so much for a prompt's token."""

    def __init__(self, model: Model, caches: RowCaches) -> None:
        super().__init__(model, caches)
        self.clock = Clock(tick_s=QUICK_S)
        self.token_s = 1e-4

    def forward(
        self, batch: Batch, caches: PassCaches, *, lone_row: bool = True, least: int = 1
    ) -> mx.array:
        """Do the pass."""
        tokens = batch.tokens.size
        prompts = tokens - sum(count == 1 for count in batch.counts or (batch.width,) * tokens)
        self.clock.now_s += 1e-2 + self.token_s * prompts
        return super().forward(batch, caches, lone_row=lone_row, least=least)


@pytest.mark.parametrize(
    ("most", "options"),
    [(64, {}), (2048, {}), (2048, {"top_logprobs": 1})],
    ids=["before the step's", "along", "apart"],
)
def test_what_prompts_take_is_learnt_from_steps(
    model: Model, most: int, options: dict[str, Any]
) -> None:
    """The first prompt, of a few tokens, tells little; of the others no pass is waited for."""
    compiled, caches = compiled_in_place(model, context_max=CONTEXT, rows_max=ROWS_MAX)
    passes = Timed(compiled._model, caches)
    passes.capabilities = replace(passes.capabilities, prompts_in_place=most)
    served = Served(passes, caches, clock=passes.clock)
    begin(served, max_tokens=200)
    passes.token_s *= 10
    for number in range(2, 12):
        served.submit(prompt_of(number, 65), max_tokens=2, **options)
        for _ in range(6):
            served.engine.step()

    # Passes of their own have a start of their own.
    assert served.engine._pacer.prefill_token_s == pytest.approx(passes.token_s, rel=0.6)


def test_decoding_is_told_from_what_is_waited_for(model: Model) -> None:
    """Prompts whose scores are asked for have passes that steps wait for."""
    compiled, caches = compiled_in_place(model, context_max=CONTEXT, rows_max=ROWS_MAX)
    passes = Timed(compiled._model, caches)
    passes.token_s = 1e-3
    served = Served(passes, caches, clock=passes.clock)
    begin(served, max_tokens=200)
    for number in range(2, 10):
        served.submit(prompt_of(number, 65), max_tokens=2, prompt_logprobs=1)
        for _ in range(3):
            served.engine.step()

    # A row that joins has a pass of its own first.
    assert served.engine._pacer.decode_step_s < 2.1e-2


def test_a_long_prompt_goes_by_products(model: Model) -> None:
    """It is read apart, between steps, and the row beside it goes on."""
    served = serve(model)
    first = begin(served, max_tokens=30)
    sink = served.submit(prompt_of(2, LONG))
    assert passes_of(served.engine.step) > 1
    served.finish()
    assert sink.ids == alone(model, prompt_of(2, LONG))
    assert first.ids == alone(model, prompt_of(1, 4), max_tokens=30)


Stream = tuple[int, int, int, bool]
"""Tokens of its prompt, new ones, steps before the next stream comes, and whether it is cancelled
then."""
STREAMS = st.tuples(
    st.integers(1, 150),
    st.integers(1, 9),
    st.integers(0, 4),
    st.integers(0, 5).map(lambda number: number == 0),
)


@settings(
    max_examples=PROGRAMS,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    program=st.lists(STREAMS, min_size=2, max_size=9),
    each_s=st.sampled_from((QUICK_S, 1e-3, SLOW_S)),
    most=st.sampled_from((64, 256, 2048)),
)
def test_whoever_comes_and_goes_all_say_what_they_say_alone(
    model: Model, program: list[Stream], each_s: float, most: int
) -> None:
    """Prompts and streams of any length, some cancelled in the step that took them along."""
    served = serve(model, each_s=each_s, most=most)
    sinks = []
    for number, (tokens, new, steps, leaves) in enumerate(program, start=1):
        sinks.append(served.submit(prompt_of(number, tokens), max_tokens=new))
        for _ in range(steps):
            served.engine.step()
        if leaves:
            served.engine.cancel(StreamId(number))
    served.finish()

    for number, (sink, (tokens, new, _, leaves)) in enumerate(
        zip(sinks, program, strict=True), start=1
    ):
        expected = alone(model, prompt_of(number, tokens), max_tokens=new)
        assert sink.ids == expected[: len(sink.ids)]
        assert leaves or len(sink.ids) == new
