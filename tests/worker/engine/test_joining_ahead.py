"""Where prompts are written in place, steps stay ahead while rows join: the same tokens, sooner."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import pytest

from mlxd_shared.domain.cache_reasons import CacheReason
from mlxd_worker.cache import changes
from mlxd_worker.cache.kept.contents import RowContents
from mlxd_worker.cache.layers.shapes import WIDE_SLOTS_MAX
from mlxd_worker.cache.layers.tokens import READS_MAX
from mlxd_worker.cache.prefix.lookup import PUT_BACK_MIN
from mlxd_worker.cache.prefix.prefix import PrefixCache
from mlxd_worker.cache.rows import RowCaches
from mlxd_worker.engine.loop import Engine, Limits
from mlxd_worker.engine.request import Finished, StreamId, Submit
from mlxd_worker.engine.speculation.speculator import Speculator
from mlxd_worker.engine.stepping.choose import choose
from mlxd_worker.models.base import Model, Passes
from tests.support.counting import calls_of
from tests.support.engines import GREEDY, Collected
from tests.worker.engine.test_ahead import Silent
from tests.worker.in_place import InPlace, compiled_in_place
from tests.worker.tiny import config_with, load, write_model

CONTEXT = 1024
ROWS_MAX = 4
LONG = 800
"""Tokens of a prompt that products read: a pass that the step under way is waited for first."""


@pytest.fixture(autouse=True)
def _traced_each_time() -> Iterator[None]:
    """Run what would be compiled as it is written: a CPU's compiler is not what is tested."""
    mx.disable_compile()
    yield
    mx.enable_compile()


class Served:
    """An engine that is given a model and its caches."""

    def __init__(
        self,
        model: Passes,
        caches: RowCaches,
        *,
        prefix_nbytes: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.stepper = choose(model, caches)
        self.prefix = PrefixCache(caches, budget_nbytes=prefix_nbytes)
        self.engine = Engine(
            model,
            caches,
            lambda request: Silent(),
            Limits(context_length=CONTEXT, rows_max=ROWS_MAX),
            stepper=self.stepper,
            prefix=self.prefix,
            clock=clock,
        )
        self._streams = 0

    def submit(self, prompt: tuple[int, ...], **options: Any) -> Collected:
        """Submit a greedy stream of 12 tokens unless told otherwise."""
        self._streams += 1
        sink = Collected()
        values: dict[str, Any] = {
            "sampling": GREEDY,
            "max_tokens": 12,
            "stop": (),
            "stop_token_ids": frozenset(),
            "eos_ids": frozenset(),
            "skip_special_tokens": False,
            "submitted_s": time.monotonic(),
        }
        request = Submit(
            stream=StreamId(self._streams), prompt=prompt, sink=sink, **{**values, **options}
        )
        self.engine.submit(request)
        return sink

    def finish(self) -> None:
        """Step until nobody is left."""
        while self.engine.busy:
            self.engine.step()


@pytest.fixture(scope="module", name="model")
def _model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return load(write_model(tmp_path_factory.mktemp("model"), config_with()))


def in_place(model: Model, **options: Any) -> Served:
    """Return an engine as a GPU would run it."""
    passes, caches = compiled_in_place(model, context_max=CONTEXT, rows_max=ROWS_MAX)
    return Served(passes, caches, **options)


def alone(model: Model, prompt: tuple[int, ...], **options: Any) -> list[int]:
    """Return what a stream says with nobody beside it, by the model's own passes."""
    served = Served(model, RowCaches(model.new_caches(), context_max=CONTEXT, rows_max=ROWS_MAX))
    sink = served.submit(prompt, **options)
    served.finish()
    return sink.ids


def prompt_of(number: int, tokens: int) -> tuple[int, ...]:
    """Return a prompt like no other."""
    return tuple((5 * number + 3 * at) % 59 + 1 for at in range(tokens))


def test_steps_stay_ahead_while_rows_join_and_leave(model: Model) -> None:
    """Once a step is ahead there is one after each, whoever comes; all say what they say alone."""
    served = in_place(model)
    prompts = [prompt_of(number, 5 + 9 * number) for number in range(7)]
    sinks = [served.submit(prompts[0], max_tokens=40)]
    while not served.stepper.ahead:
        served.engine.step()

    aheads = []
    for number, prompt in enumerate(prompts[1:], start=1):
        sinks.append(served.submit(prompt, max_tokens=3 + number))
        for _ in range(4):
            served.engine.step()
            aheads.append(served.stepper.ahead)
    served.finish()

    assert all(aheads)
    lengths = [40, *(3 + number for number in range(1, 7))]
    for sink, prompt, length in zip(sinks, prompts, lengths, strict=True):
        assert sink.ids == alone(model, prompt, max_tokens=length)


def test_a_long_prompt_waits_for_the_step_under_way_and_disturbs_nobody(model: Model) -> None:
    """It is read by products, which write arrays that the step still refers to."""
    served = in_place(model)
    short, long = prompt_of(1, 4), prompt_of(2, LONG)
    first = served.submit(short, max_tokens=30)
    while not served.stepper.ahead:
        served.engine.step()
    second = served.submit(long)
    served.finish()

    assert first.ids == alone(model, short, max_tokens=30)
    assert second.ids == alone(model, long)


def test_a_beginning_is_put_back_while_a_step_is_ahead(model: Model) -> None:
    """What others have read is restored between two steps, into nobody else's row."""
    served = in_place(model, prefix_nbytes=1 << 24)
    common = prompt_of(3, 100)
    served.submit(common, max_tokens=2)
    served.finish()
    beside = served.submit(prompt_of(4, 6), max_tokens=30)
    while not served.stepper.ahead:
        served.engine.step()
    prompt = (*common, 7, 8, 9)
    sink = served.submit(prompt)
    served.finish()

    finished = sink.events[-1]
    assert isinstance(finished, Finished)
    assert finished.usage.cached_tokens >= len(common) - 1
    assert sink.ids == alone(model, prompt)
    assert beside.ids == alone(model, prompt_of(4, 6), max_tokens=30)


@pytest.mark.parametrize("wait", [changes.wait, changes.wait_for_all])
def test_nobody_waits_for_a_beginning_to_be_put_back(
    model: Model, wait: Callable[..., None]
) -> None:
    """It goes behind the step under way, from what is kept and from a row that still runs."""
    served = in_place(model, prefix_nbytes=1 << 24)
    kept, running = prompt_of(3, 100), prompt_of(4, 100)
    served.submit(kept, max_tokens=2)
    served.finish()
    beside = served.submit(running, max_tokens=40)
    while not served.stepper.ahead:
        served.engine.step()
    prompts = [(*kept, 7, 8, 9), (*running, 5, 6)]
    sinks = [served.submit(prompt) for prompt in prompts]

    def step_until_both_decode() -> None:
        while not all(sink.ids for sink in sinks):
            served.engine.step()

    assert calls_of(step_until_both_decode, wait) == 0
    served.finish()
    for sink, prompt in zip(sinks, prompts, strict=True):
        finished = sink.events[-1]
        assert isinstance(finished, Finished)
        assert finished.usage.cached_tokens >= 99
        assert sink.ids == alone(model, prompt)
    assert beside.ids == alone(model, running, max_tokens=40)


def test_what_is_kept_is_cut_without_a_wait(model: Model) -> None:
    """Where two prompts part, what was one piece becomes two, behind the step under way."""
    served = in_place(model, prefix_nbytes=1 << 24)
    kept = prompt_of(3, 100)
    served.submit(kept, max_tokens=2)
    served.finish()
    served.submit(prompt_of(4, 6), max_tokens=30)
    while not served.stepper.ahead:
        served.engine.step()
    parting = (*kept[:50], *prompt_of(5, 40))
    sink = served.submit(parting, max_tokens=2)

    assert calls_of(served.finish, changes.wait) == 0
    assert sink.ids == alone(model, parting, max_tokens=2)


@pytest.mark.parametrize(("tokens", "apart"), [(100, False), (600, True)])
def test_prompts_that_are_too_much_for_one_pass_in_place_have_several(
    model: Model, tokens: int, *, apart: bool
) -> None:
    """Else all would be read by products, whose writes take as long as the arena is large."""
    served = in_place(model)
    for number in (5, 6):
        served.submit(prompt_of(number, tokens))
    served.engine._admit()
    prefill = served.engine._prefill
    first, second = [(row, row.next_chunk(tokens)) for row in served.engine._rows.values()]
    assert not prefill._is_better_apart(first)
    prefill._company.append(first)

    assert prefill._is_better_apart(second) == apart


@pytest.mark.parametrize(("common", "restored"), [(PUT_BACK_MIN - 1, 0), (PUT_BACK_MIN, 1)])
def test_a_few_tokens_in_common_are_read_anew(model: Model, common: int, restored: int) -> None:
    """Every text begins with some token: to put that back would have each row wait for a step."""
    served = in_place(model, prefix_nbytes=1 << 24)
    beginning = prompt_of(3, common)
    served.submit((*beginning, 60, 59), max_tokens=2)
    served.finish()
    prompt = (*beginning, 7, 8, 9)
    sink = served.submit(prompt)

    assert calls_of(served.finish, RowContents.restore) == restored
    finished = sink.events[-1]
    assert isinstance(finished, Finished)
    assert finished.usage.cached_tokens == restored * common
    assert finished.usage.cache_reason is CacheReason.DIVERGED
    assert sink.ids == alone(model, prompt)


def test_rows_that_end_are_kept_without_a_wait(model: Model) -> None:
    """Their copies go behind the step that is ahead, and their slots' next rows behind these."""
    served = in_place(model, prefix_nbytes=1 << 24)
    prompts = [prompt_of(number, 70) for number in range(ROWS_MAX)]
    sinks = [served.submit(prompt) for prompt in prompts]
    while not served.stepper.ahead:
        served.engine.step()
    newcomers = [prompt_of(number, 30) for number in (5, 6)]
    sinks += [served.submit(prompt) for prompt in newcomers]

    assert calls_of(served.finish, changes.wait) == 0
    for sink, prompt in zip(sinks, (*prompts, *newcomers), strict=True):
        assert sink.ids == alone(model, prompt)
    for sink, prompt in zip(sinks[:ROWS_MAX], prompts, strict=True):
        longer = (*prompt, *sink.ids, 7, 8)
        again = served.submit(longer)
        served.finish()
        finished = again.events[-1]
        assert isinstance(finished, Finished)
        assert finished.usage.cached_tokens == len(prompt) + len(sink.ids) - 1
        assert again.ids == alone(model, longer)


def test_prompts_apart_wait_for_other_prompts_and_copies_too(model: Model) -> None:
    """No step's tokens tell when these are done, and behind them an arena is copied whole."""
    served = in_place(model)
    served.submit(prompt_of(1, 4), max_tokens=30)
    while not served.stepper.ahead:
        served.engine.step()
    served.submit(prompt_of(2, 9), prompt_logprobs=1)

    assert calls_of(served.finish, changes.wait_for_all) >= 1
    served.stepper.drop()
    assert calls_of(served.stepper.rest, changes.wait_for_all) == 1


def test_what_nobody_judged_is_cleared_for_the_next_row(model: Model) -> None:
    """A row cancelled in its prompt may hold what is no number: the next one does not meet it."""
    served = in_place(model)
    served.submit(prompt_of(2, LONG))
    served.engine.step()
    row = served.engine._rows[StreamId(1)]
    assert not row.decoding
    caches = served.engine._caches
    place = caches.table.place(row.id)
    for layer in caches.layers:
        assert isinstance(layer, InPlace)
        keys, values = layer.lend(place.arena)
        values[place.slot, :, row.offset - 1] = mx.nan
        layer.settle(place.arena, [keys, values])
    served.engine.cancel(StreamId(1))
    sink = served.submit(prompt_of(3, 9))
    served.finish()

    assert sink.ids == alone(model, prompt_of(3, 9))


def test_rows_guess_only_what_a_pass_in_place_reads(model: Model) -> None:
    """Else a pass over the whole arena would be made, of a shape that nobody has run before."""
    served = in_place(model)
    for number in range(2):
        served.submit(prompt_of(number, 5), max_tokens=30)
    for _ in range(3):
        served.engine.step()
    speculator, rows = served.stepper, list(served.engine._rows.values())
    assert isinstance(speculator, Speculator)

    assert speculator._is_warm(rows, 8)
    rows[0].offset = READS_MAX // 8
    assert not speculator._is_warm(rows, 8)
    assert speculator._is_warm(rows[:1], 8)
    assert not speculator._is_warm(rows * WIDE_SLOTS_MAX, 1)


def test_a_row_that_has_to_be_looked_after_has_a_pass_of_its_own_first(model: Model) -> None:
    """Penalties need the tokens before: such a row joins no step that is made up ahead."""
    served = in_place(model)
    first = served.submit(prompt_of(1, 4), max_tokens=20)
    while not served.stepper.ahead:
        served.engine.step()
    second = served.submit(prompt_of(5, 9), top_logprobs=1)
    served.finish()

    assert first.ids == alone(model, prompt_of(1, 4), max_tokens=20)
    assert second.ids == alone(model, prompt_of(5, 9))
