"""Rows that are judged together are told what each would be told by itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlxd_shared import config
from mlxd_shared.domain.errors import DeadlinePassed, ShuttingDown
from mlxd_worker.engine.judging import judge_plainly
from mlxd_worker.engine.request import Event, Failed, Finished, Tokens
from mlxd_worker.engine.row import Row
from mlxd_worker.models.base import Model
from mlxd_worker.tokenizing.files import load_tokenizer
from tests.support.counting import calls_of
from tests.support.engines import GREEDY, Owed, TinyEngine, engine_on
from tests.support.tiny_model import write_tiny_model
from tests.worker.tiny import config_with, load, write_model

DRAWN = replace(GREEDY, temperature=1.0, top_k=20, seed=3)
OPTIONS: tuple[dict[str, Any], ...] = (
    {"max_tokens": 1},
    {"max_tokens": 9},
    {"max_tokens": 9, "sampling": DRAWN},
    {"max_tokens": None},
    {"max_tokens": 30, "stop_token_ids": frozenset(range(0, 61, 7))},
    {"max_tokens": 30, "eos_ids": frozenset(range(0, 61, 5)), "sampling": DRAWN},
    {"max_tokens": 30, "eos_ids": frozenset(range(0, 61, 3)), "min_tokens": 6},
    {"max_tokens": 9, "stop": ("e",)},
    {"max_tokens": 9, "top_logprobs": 2},
    {"max_tokens": 9, "prompt_logprobs": 1},
    {"max_tokens": 9, "sampling": replace(GREEDY, repetition_penalty=1.3, repeat_last_n=8)},
    {"max_tokens": 9, "speculation_depth": 4},
)
"""What streams ask for, plain and not; some end in the middle of a step of others."""


@pytest.fixture(scope="module", name="model")
def _model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return load(write_model(tmp_path_factory.mktemp("model"), config_with()))


@pytest.fixture(scope="module", name="folder")
def _folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tokenizer"))


def make_engine(model: Model, folder: Path, **options: Any) -> TinyEngine:
    """Return an engine with room for all that is asked."""
    return engine_on(
        model, load_tokenizer(folder), rows_max=len(OPTIONS), context_length=64, **options
    )


def run_all(model: Model, folder: Path, before_step: Callable[[Row], None]) -> list[list[Event]]:
    """Return what each stream is told, durations left out; `before_step` sees each row first."""
    tiny = make_engine(model, folder)
    sinks = [
        tiny.submit((1, 2, 3 + number), **options)[1] for number, options in enumerate(OPTIONS)
    ]  # fmt: skip
    while tiny.engine.busy:
        for row in tiny.engine._rows.values():
            before_step(row)
        tiny.engine.step()
    return [[without_times(event) for event in sink.events] for sink in sinks]


def without_times(event: Event) -> Event:
    """Return an event but for how long it took."""
    if not isinstance(event, Finished):
        return event
    usage = replace(event.usage, queue_s=0.0, prompt_s=0.0, completion_s=0.0)
    return replace(event, usage=usage)


def test_streams_are_told_the_same_as_one_by_one(model: Model, folder: Path) -> None:
    """Ids, text, offsets, ends, log-probabilities: of each stream alike, whatever others ask."""

    def judge_by_itself(row: Row) -> None:
        row.plain = False

    apart = run_all(model, folder, judge_by_itself)
    together = run_all(model, folder, lambda row: None)

    assert together == apart
    reasons = {events[-1].reason for events in together if isinstance(events[-1], Finished)}
    assert len(reasons) >= 4, "they end in many ways"


def test_only_what_nothing_but_an_end_concerns_is_judged_together(
    model: Model, folder: Path
) -> None:
    """Stop strings, penalties, log-probabilities and guesses are looked at token by token."""
    tiny = make_engine(model, folder)
    for number, options in enumerate(OPTIONS):
        tiny.submit((1, 2, 3 + number), **{**options, "max_tokens": 20})
    tiny.engine._admit()
    plain = [row.plain for row in tiny.engine._rows.values()]

    of_text = {number for number, options in enumerate(OPTIONS) if "stop" in options}
    watched = {number for number, options in enumerate(OPTIONS) if "top_logprobs" in options}
    penalised = {10}
    expected = [number not in of_text | watched | penalised for number in range(len(OPTIONS))]
    assert plain == expected


class Breaking:
    """A decoder that fails at one token."""

    def __init__(self, at: int) -> None:
        self._left = at

    def push(self, token_id: int) -> str:
        """Take an id."""
        self._left -= 1
        if not self._left:
            message = "no text"
            raise ValueError(message)
        return f"<{token_id}>"

    def finish(self) -> str:
        """End."""
        return ""


@pytest.mark.parametrize("at", [1, 2, 5])
def test_a_text_that_cannot_be_written_ends_its_own_stream(
    model: Model, folder: Path, at: int
) -> None:
    """Those beside it go on, and its row is free for another."""
    decoders = iter([Breaking(at), Breaking(100), Breaking(100)])
    tiny = make_engine(model, folder, make_decoder=lambda _: next(decoders))
    sinks = [tiny.submit((1, 2, 3 + number))[1] for number in range(2)]
    tiny.run()

    assert isinstance(sinks[0].events[-1], Failed)
    assert len(sinks[0].ids) == at - 1
    assert len(sinks[1].ids) == 8
    assert sinks[1].text == "".join(f"<{token_id}>" for token_id in sinks[1].ids)
    assert tiny.caches.rows == ()
    assert len(tiny.alone((4, 5)).ids) == 8


def test_a_plain_token_costs_no_call(model: Model, folder: Path) -> None:
    """A sink hears of the first that it is owed; texts and events are made once it asks."""
    tiny = make_engine(model, folder, make_decoder=lambda _: Breaking(100))
    sinks = [Owed() for _ in range(8)]
    for number, sink in enumerate(sinks):
        tiny.submit((1, 2, 3 + number), max_tokens=20, sink=sink)
    while not all(sink.ids for sink in sinks):
        tiny.engine.step()
    for sink in sinks:
        sink.ask()

    assert calls_of(tiny.engine.step, Owed.owe) == 8
    for call in (Owed.owe, Tokens.__init__, Owed.put, Row.take, Breaking.push):
        assert calls_of(tiny.engine.step, call) == 0, call
    assert calls_of(tiny.engine.step, judge_plainly) == 1
    assert calls_of(sinks[0].ask, Tokens.__init__) == 1
    event = sinks[0].events[-1]
    assert isinstance(event, Tokens)
    assert len(event.ids) >= 7
    assert event.text == "".join(f"<{token_id}>" for token_id in event.ids)


def test_what_is_owed_comes_before_what_else_is_told(model: Model, folder: Path) -> None:
    """A sink that never asks has all tokens when its stream ends, in order, and no sooner."""
    prompt = (1, 2, 3)
    said = make_engine(model, folder).alone(prompt, max_tokens=12)
    tiny, sink = make_engine(model, folder), Owed()
    tiny.submit(prompt, max_tokens=12, sink=sink)
    tiny.run()

    first, owed, last = sink.events
    assert isinstance(first, Tokens)
    assert isinstance(owed, Tokens)
    assert isinstance(last, Finished)
    assert [event.offset for event in (first, owed, last)] == [0, 1, 11]
    assert (sink.ids, sink.text) == (said.ids, said.text)


def test_a_failed_stream_is_told_what_it_has_drawn(model: Model, folder: Path) -> None:
    """Whatever ends it: its tokens come before the error."""
    tiny, sink = make_engine(model, folder), Owed()
    tiny.submit((1, 2, 3), max_tokens=40, sink=sink)
    for _ in range(9):
        tiny.engine.step()
    tiny.engine.fail_all(DeadlinePassed(0))

    assert isinstance(sink.events[-1], Failed)
    assert len(sink.ids) >= 7


def start_broken(model: Model, folder: Path, *, breaks_at: int) -> tuple[TinyEngine, Owed, Owed]:
    """Return an engine with two streams that have begun, the first of which will have no text."""
    decoders = iter([Breaking(breaks_at), Breaking(100)])
    tiny = make_engine(model, folder, make_decoder=lambda _: next(decoders))
    sink, other = Owed(), Owed()
    for number, each in enumerate((sink, other)):
        tiny.submit((1, 2, 3 + number), max_tokens=20, sink=each)
    while not sink.ids:
        tiny.engine.step()
    for _ in range(6):
        tiny.engine.step()
    return tiny, sink, other


def test_a_text_that_cannot_be_written_later_ends_its_own_stream(
    model: Model, folder: Path
) -> None:
    """Its sink has what was written, and then the error, once; others go on to their ends."""
    tiny, sink, other = start_broken(model, folder, breaks_at=4)
    sink.ask()
    tiny.run()

    assert [type(event) for event in sink.events] == [Tokens, Tokens, Failed]
    assert (len(sink.ids), sink.text.count("<")) == (3, 3)
    assert len(other.ids) == 20
    assert tiny.caches.rows == ()


ENDS: tuple[Callable[[TinyEngine], None], ...] = (
    lambda tiny: tiny.engine.fail_all(ShuttingDown()),
    lambda tiny: tiny.engine.release_all(ShuttingDown()),
    lambda tiny: tiny.run(),
)


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("asks", [False, True])
def test_a_stream_without_a_text_has_one_end(
    model: Model, folder: Path, asks: bool, end: Callable[[TinyEngine], None]
) -> None:
    """Whatever comes upon it before its row has gone, and whether its sink knows or not."""
    tiny, sink, _ = start_broken(model, folder, breaks_at=4)
    if asks:
        sink.ask()
    end(tiny)
    assert [type(event) for event in sink.events] == [Tokens, Tokens, Failed]


def test_a_stream_that_leaves_is_owed_nothing(model: Model, folder: Path) -> None:
    """Its texts are not written, whenever its sink asks."""
    tiny, sink, _ = start_broken(model, folder, breaks_at=4)
    (stream,) = [n for n, row in tiny.engine._rows.items() if row.request.sink is sink]
    tiny.engine.cancel(stream)
    sink.ask()
    assert [type(event) for event in sink.events] == [Tokens]


def test_when_a_sink_asks_changes_no_step(model: Model, folder: Path) -> None:
    """Ranks follow steps, and only the first one's sinks know when their streams are told."""
    runs = []
    for asks in (False, True):
        tiny, sink, _ = start_broken(model, folder, breaks_at=4)
        rows = []
        while tiny.engine.busy:
            if asks:
                sink.ask()
            tiny.engine.step()
            rows.append(tiny.caches.rows)
        runs.append(rows)
    assert runs[0] == runs[1]


def test_what_is_owed_comes_in_messages(model: Model, folder: Path) -> None:
    """No event has more tokens than a message may."""
    most = config.EVENTS_PER_MESSAGE_MAX
    tiny = engine_on(model, load_tokenizer(folder), rows_max=1, context_length=4 * most)
    sink = Owed()
    tiny.submit((1, 2, 3), max_tokens=2 * most + 12, sink=sink)
    tiny.run()
    counts = [len(event.ids) for event in sink.events if isinstance(event, Tokens)]
    assert counts == [1, most, most, 10]
