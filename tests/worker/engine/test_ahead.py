"""A step made up before the last one is read: the same streams, and never where it may not."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest

from mlxd_worker.cache.base import RowId
from mlxd_worker.cache.rows import RowCaches
from mlxd_worker.engine.loop import Engine, Limits
from mlxd_worker.engine.request import StreamId, Submit
from mlxd_worker.engine.sampling.sampler import needs_second_look
from mlxd_worker.engine.stepping.ahead import Ahead, Lead
from mlxd_worker.engine.stepping.base import Stepper
from mlxd_worker.engine.stepping.choose import choose, main_road, way_of
from mlxd_worker.engine.stepping.compiled import CompiledModel
from mlxd_worker.kernels.device import runs_cpu
from mlxd_worker.models.base import Model, Passes
from tests.support.engines import GREEDY, Collected, joined_as_chosen
from tests.support.mlx_memory import live_nbytes
from tests.worker.tiny import config_with, load, write_model

CONTEXT, ROWS_MAX = 512, 4
CROWD = 20
SAMPLED = replace(GREEDY, temperature=0.9, top_k=20, seed=5)


@pytest.fixture(autouse=True)
def _traced_each_time() -> Iterator[None]:
    """Run what would be compiled as it is written: a CPU's compiler is not what is tested."""
    mx.disable_compile()
    yield
    mx.enable_compile()


def itself(model: Model, caches: RowCaches) -> Passes:
    """Decode with the model as it is, as on a CPU."""
    del caches
    return model


on_cpu = pytest.mark.skipif(not runs_cpu(), reason="only there a step is made up ahead")
MADE_UP = pytest.param(itself, marks=on_cpu, id="made up")


class InPlace(CompiledModel):
    """Claims what only CUDA has: elsewhere running ahead copies, which costs time alone."""

    def __init__(self, model: Model, caches: RowCaches) -> None:
        super().__init__(model, caches)
        self.capabilities = replace(self.capabilities, overlaps_steps=True)


def never_ahead(model: Passes, caches: RowCaches) -> Stepper:
    """Return the stepper that a load chooses, but for running ahead."""
    return main_road(model, caches, replace(way_of(model.capabilities, caches), lead=None))


class Silent:
    """A decoder for ids that have no text."""

    def push(self, token_id: int) -> str:
        """Take an id."""
        del token_id
        return ""

    def finish(self) -> str:
        """End."""
        return ""


class Served:
    """An engine on a tiny model, running ahead or not."""

    def __init__(
        self,
        model: Model,
        kind: Callable[[Model, RowCaches], Passes],
        make_stepper: Callable[[Passes, RowCaches], Stepper] = choose,
        *,
        rows_max: int = ROWS_MAX,
    ) -> None:
        self.caches = RowCaches(
            model.new_caches(context_max=CONTEXT),
            context_max=CONTEXT,
            rows_max=rows_max,
            bounded_shapes=kind is not itself,
            keeps_spares=True,
        )
        used = kind(model, self.caches)
        self.stepper = make_stepper(used, self.caches)
        self.engine = Engine(
            used,
            self.caches,
            lambda request: Silent(),
            Limits(context_length=CONTEXT, rows_max=rows_max),
            stepper=self.stepper,
        )
        self.aheads = 0
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

    def steps(self, count: int) -> None:
        """Do some steps, counting those after which another is under way."""
        for _ in range(count):
            if self.engine.busy:
                self.engine.step()
                self.aheads += self.stepper.ahead


@pytest.fixture(scope="module", name="model")
def _model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return load(write_model(tmp_path_factory.mktemp("model"), config_with()))


def serve_mixed(served: Served) -> list[Collected]:
    """Serve streams that join, end in different ways, cross a class, and are cancelled."""
    first = served.submit((1, 2, 3), max_tokens=30)
    served.steps(5)
    ends = served.submit((4, 5), sampling=SAMPLED, eos_ids=frozenset(range(0, 60, 3)))
    crosses = served.submit(tuple(range(7, 57)) * 5, sampling=SAMPLED, max_tokens=20)
    served.steps(6)
    served.submit((9,), max_tokens=40)
    served.steps(4)
    served.engine.cancel(StreamId(4))
    penalised = served.submit((6, 6), sampling=replace(GREEDY, frequency_penalty=1.5))
    late = [served.submit((20 + n, 3), max_tokens=n) for n in range(1, 7)]
    served.steps(200)
    assert not served.engine.busy
    return [first, ends, crosses, penalised, *late]


@pytest.mark.parametrize("kind", [pytest.param(InPlace, id="dispatched"), MADE_UP])
def test_streams_are_the_same_a_step_ahead(
    model: Model, kind: Callable[[Model, RowCaches], Passes]
) -> None:
    """Whoever joins, ends, is cancelled or moves meanwhile, every stream gets the same tokens."""
    ahead = Served(model, kind)
    plain = Served(model, CompiledModel if kind is InPlace else kind, never_ahead)

    sinks, expected = serve_mixed(ahead), serve_mixed(plain)

    assert [sink.drawn for sink in sinks] == [sink.drawn for sink in expected]
    assert [sink.reason for sink in sinks] == [sink.reason for sink in expected]
    assert ahead.aheads > 5  # how many depends on how long prompts take, by the clock
    assert plain.aheads == 0
    ahead.caches.rest()
    assert ahead.caches.nbytes == 0, "rows that ended left nothing but spares"


@pytest.mark.parametrize(
    "options",
    [
        {"sampling": replace(GREEDY, presence_penalty=0.5)},
        {"top_logprobs": 2},
        {"max_tokens": 1},
        {"resumed": 2},
    ],
    ids=["penalties", "log-probabilities", "last token", "resumed"],
)
@pytest.mark.parametrize("kind", [pytest.param(InPlace, id="dispatched"), MADE_UP])
def test_no_step_is_under_way_that_needs_the_token_before(
    model: Model, kind: Callable[[Model, RowCaches], Passes], options: dict[str, Any]
) -> None:
    """What the host must decide first keeps all rows of its step from running ahead."""
    served = Served(model, kind)
    served.submit((1, 2, 3), **options)
    served.steps(1)
    assert not served.stepper.ahead
    served.steps(50)
    assert served.aheads == 0


def test_a_row_at_its_class_s_end_waits_to_move(model: Model) -> None:
    """A move changes arrays that the step under way refers to, so it comes first."""
    served = Served(model, InPlace)
    served.submit(tuple(range(50)) * 5, max_tokens=20)  # 250 tokens of a capacity of 256
    seen = []
    for _ in range(8):
        served.steps(1)
        seen.append(served.stepper.ahead)
    assert seen.count(False) == 1
    assert seen[0]
    assert seen[-1]


def test_steps_are_ahead_while_a_class_moves(model: Model) -> None:
    """One row more than an arena holds: all move, one a step, each with what was written ahead."""

    def serve(make_stepper: Callable[[Passes, RowCaches], Stepper]) -> tuple[int, list[list[int]]]:
        served = Served(model, InPlace, make_stepper, rows_max=CROWD)
        sinks = [served.submit((n, 3), max_tokens=60) for n in range(CROWD - 4)]
        served.steps(CROWD)
        sinks.append(served.submit((7, 7), max_tokens=40))
        ahead = 0
        while served.engine.busy:
            served.steps(1)
            ahead += served.stepper.ahead and served.caches.table.moving
        return ahead, [sink.drawn for sink in sinks]

    ahead, streams = serve(choose)
    none_ahead, expected = serve(never_ahead)

    assert ahead > 10
    assert none_ahead == 0
    assert streams == expected


@on_cpu
def test_a_row_that_draws_its_last_token_is_left_out_of_the_next_step(model: Model) -> None:
    """The others go on ahead: one that ends does not hold them up."""
    served = Served(model, itself)
    served.submit((1, 2, 3), max_tokens=30)
    ends = served.submit((4, 5), max_tokens=4)
    while not ends.ended:
        served.steps(1)

    assert served.stepper.ahead
    served.steps(40)
    assert not served.engine.busy


@on_cpu
def test_what_is_ahead_of_nobody_is_forgotten(model: Model) -> None:
    """Its rows are cancelled while another stream waits: that one is served all the same."""
    served = Served(model, itself)
    gone = [served.submit((n, 3), max_tokens=40) for n in range(ROWS_MAX)]
    served.steps(ROWS_MAX + 2)
    assert served.stepper.ahead
    waits = served.submit((9, 9), max_tokens=5)
    for stream in range(1, ROWS_MAX + 1):
        served.engine.cancel(StreamId(stream))
    served.steps(10)

    assert len(waits.drawn) == 5
    assert not any(sink.ended for sink in gone)


def test_a_nucleus_is_looked_at_again_before_the_next_step(model: Model) -> None:
    """On a CPU it is first drawn from the best tokens alone, so its token is not final."""
    wide = replace(GREEDY, temperature=1.0, top_p=0.9, seed=3)
    assert needs_second_look(wide, vocab_size=32_000)
    assert not needs_second_look(replace(wide, top_k=20), vocab_size=32_000)
    assert not needs_second_look(GREEDY, vocab_size=32_000)


@on_cpu
def test_a_step_made_up_ahead_writes_keys_and_values_in_place(model: Model) -> None:
    """It is dispatched when nothing refers to them any more: no arena is ever there twice."""
    served = Served(model, itself)
    for n in range(ROWS_MAX):
        served.submit((n, 3), max_tokens=40)
    served.steps(ROWS_MAX + 3)
    before = live_nbytes()
    mx.reset_peak_memory()

    served.steps(20)

    assert served.stepper.ahead
    assert mx.get_peak_memory() - before < served.caches.nbytes // 2


@on_cpu
def test_rows_that_sink_wait_for_what_is_under_way(model: Model) -> None:
    """Moved while a step runs ahead, a row would take a copy of its whole arena with it."""
    rested: list[bool] = []

    class Watched(Ahead):
        """Tells when it is asked to rest, and whether it was ahead then."""

        def rest(self) -> None:
            """Rest."""
            rested.append(self.ahead)
            super().rest()

    def make_watched(model: Passes, caches: RowCaches) -> Stepper:
        return joined_as_chosen(model, caches, Watched(model, caches, lead=Lead.MADE_UP))

    served = Served(model, itself, make_watched)
    for n in range(ROWS_MAX - 1):
        served.submit((n, 3), max_tokens=8)
    stays = served.submit((9, 3), max_tokens=60)
    last, moved = RowId(ROWS_MAX - 1), 0
    served.steps(ROWS_MAX + 2)
    while last in served.caches.rows:
        place, count = served.caches.table.place(last), len(rested)
        served.steps(1)
        if last in served.caches.rows and served.caches.table.place(last) != place:
            moved += 1
            assert rested[count:] == [True]
    assert moved

    alone = Served(model, itself)
    expected = alone.submit((9, 3), max_tokens=60)
    alone.steps(100)
    assert stays.drawn == expected.drawn


@on_cpu
def test_steps_are_ahead_while_others_wait_for_a_row(model: Model) -> None:
    """With all rows taken nobody's prompt is read in the next step, however many wait."""
    served = Served(model, itself)
    for n in range(2 * ROWS_MAX):
        served.submit((n, 3), max_tokens=20)
    served.steps(ROWS_MAX + 4)

    assert served.engine.occupancy().waiting == ROWS_MAX
    assert served.stepper.ahead
    served.steps(200)
    assert not served.engine.busy
