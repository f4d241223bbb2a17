"""The step loop on a real, tiny model: who gets which tokens, who waits, who ends and why."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from mlxd_models.sizes.weight_forms import FloatType
from mlxd_shared.domain.errors import InternalError, QueueFull
from mlxd_shared.domain.requests import FinishReason, Sampling
from mlxd_worker.cache.rows import RowCaches
from mlxd_worker.engine.loop import Engine, Limits
from mlxd_worker.engine.request import Event, Failed, StreamId, Tokens
from mlxd_worker.engine.stepping.choose import choose
from mlxd_worker.engine.text import TextDecoder
from mlxd_worker.models.loader import inspect_model, load_model
from tests.support.clocks import Clock
from tests.support.engines import GREEDY, Collected, TinyEngine, tiny_engine
from tests.support.tiny_model import VOCAB, write_tiny_model

NAN_TOKEN = 300
STOP = "<end>"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model."""
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def tiny(folder: Path) -> TinyEngine:
    """An engine of four rows, 512 tokens each, prefilled 64 at a time."""
    return tiny_engine(folder)


def prompt_of(seed: int, length: int) -> tuple[int, ...]:
    """Return a prompt of plain tokens."""
    draws = random.Random(seed)
    return tuple(draws.randrange(3, VOCAB) for _ in range(length))


def test_events_have_no_gap_and_one_end(tiny: TinyEngine) -> None:
    """Offsets run on from 0, and exactly the last event is an end."""
    sink = tiny.alone(prompt_of(1, 5), max_tokens=20)

    offset = 0
    for event in sink.events:
        assert not isinstance(event, Failed)
        assert event.offset == offset
        offset += len(event.ids)
    assert offset == 20 == sink.finished.usage.completion_tokens
    assert [type(event) for event in sink.events[:-1]] == [Tokens] * 19


@pytest.mark.parametrize("chunk", [1, 7, 64, 512])
def test_the_chunk_does_not_change_the_tokens(folder: Path, chunk: int) -> None:
    """However a prompt is cut into chunks, the output is that of one chunk."""
    prompt = prompt_of(2, 150)

    cut = tiny_engine(folder, chunk=chunk).alone(prompt, max_tokens=30)
    assert cut.ids == tiny_engine(folder, chunk=150).alone(prompt, max_tokens=30).ids


def test_a_prompt_of_one_token_is_served(tiny: TinyEngine) -> None:
    """The last prompt token is the decode's own: with one there is nothing to prefill."""
    assert len(tiny.alone([5]).ids) == 8


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(1.0, 40, 0.95, 0.0, seed=11)])
def test_neighbours_change_nothing(folder: Path, sampling: Sampling) -> None:
    """Rows of all lengths that come and go beside each other get the tokens of their lone runs."""
    tiny = tiny_engine(folder, rows_max=4)
    lengths = (1, 3, 70, 260, 5, 140, 300, 2)
    jobs = [(prompt_of(n, n), 10 + 7 * i) for i, n in enumerate(lengths)]

    together = [tiny.submit(p, max_tokens=m, sampling=sampling)[1] for p, m in jobs]
    tiny.run()

    lone = [tiny.alone(p, max_tokens=m, sampling=sampling).ids for p, m in jobs]
    assert [sink.ids for sink in together] == lone


def test_rows_join_in_order_of_arrival_and_are_bounded(folder: Path) -> None:
    """At most rows_max rows hold caches; the others wait, oldest first."""
    tiny = tiny_engine(folder, rows_max=2)
    sinks = [tiny.submit(prompt_of(i, 3), max_tokens=4)[1] for i in range(5)]
    order: list[int] = []

    while tiny.engine.busy:
        tiny.engine.step()
        assert len(tiny.caches.rows) <= 2
        order += [i for i, sink in enumerate(sinks) if sink.ended and i not in order]

    assert order == [0, 1, 2, 3, 4]


def test_decoding_goes_on_beside_a_long_prefill(folder: Path) -> None:
    """While one row's prompt is evaluated chunk by chunk, the other gets a token every step.

    The first step tells what was under way when the prompt came, the others take a chunk each.
    """
    tiny = tiny_engine(folder, chunk=16, clock=lambda: 0.0)  # no step is ever late
    _, short = tiny.submit(prompt_of(1, 2), max_tokens=100)
    tiny.engine.step()
    _, long = tiny.submit(prompt_of(2, 161), max_tokens=5)

    for _ in range(10):
        before = len(short.ids)
        tiny.engine.step()
        assert len(short.ids) == before + 1
        assert long.ids == []
    tiny.engine.step()
    assert len(long.ids) == 1


def test_a_full_queue_refuses(folder: Path) -> None:
    """Above rows and waiting places a stream fails at once with the queue's name and limit."""
    tiny = tiny_engine(folder, rows_max=1, waiting_max=2)
    sinks = [tiny.submit(prompt_of(i, 3))[1] for i in range(4)]

    (event,) = sinks[3].events
    assert isinstance(event, Failed)
    assert isinstance(event.error, QueueFull)
    assert event.error.limit == 2
    tiny.run()
    assert [len(sink.ids) for sink in sinks] == [8, 8, 8, 0]


@pytest.mark.parametrize("steps", [0, 1, 4, 12])
def test_cancel_frees_the_row_and_leaves_the_others(folder: Path, steps: int) -> None:
    """Waiting, in its prefill or decoding: a cancelled stream is gone, its neighbour untouched."""
    tiny = tiny_engine(folder, chunk=16)
    _, other = tiny.submit(prompt_of(1, 5), max_tokens=30)
    request, sink = tiny.submit(prompt_of(2, 100), max_tokens=30)
    for _ in range(steps):
        tiny.engine.step()
    got = len(sink.events)

    tiny.engine.cancel(request.stream)
    assert tiny.engine.streams == 1
    tiny.engine.cancel(request.stream)
    tiny.engine.cancel(StreamId(-5))
    tiny.run()

    assert len(sink.events) == got
    assert other.ids == tiny.alone(prompt_of(1, 5), max_tokens=30).ids
    tiny.rest()


def test_eos_ends_before_itself(tiny: TinyEngine) -> None:
    """An end-of-sequence token ends the stream, is named, and is no part of it."""
    whole = tiny.alone(prompt_of(3, 9), max_tokens=20).ids
    at = next(i for i, token in enumerate(whole) if i > 3 and token not in whole[:i])

    sink = tiny.alone(prompt_of(3, 9), max_tokens=20, eos_ids=frozenset({whole[at]}))

    assert sink.ids == whole[:at]
    assert (sink.reason, sink.finished.stop_token_id) == (FinishReason.EOS, whole[at])
    assert sink.finished.usage.completion_tokens == at
    assert sink.finished.ids == ()


def test_a_stop_token_goes_before_eos(tiny: TinyEngine) -> None:
    """What the request itself names is the reason, also where the model would end there too."""
    whole = tiny.alone(prompt_of(3, 9)).ids
    both = frozenset({whole[2]})

    sink = tiny.alone(prompt_of(3, 9), stop_token_ids=both, eos_ids=both)

    assert (sink.reason, sink.finished.stop_token_id) == (FinishReason.STOP_TOKEN, whole[2])
    assert sink.ids == whole[: whole.index(whole[2])]


@pytest.mark.parametrize("width", [1, 2, 5])
def test_a_stop_string_is_cut_out(tiny: TinyEngine, width: int) -> None:
    """Text ends before the stop string, wherever token borders are; the ids still count."""
    whole = tiny.alone(prompt_of(4, 9), max_tokens=40)
    stop = whole.text[12 : 12 + width]

    sink = tiny.alone(prompt_of(4, 9), max_tokens=40, stop=("\x00never", stop))

    assert sink.text == whole.text[: whole.text.index(stop)]
    assert (sink.reason, sink.finished.stop) == (FinishReason.STOP_STRING, stop)
    assert sink.ids == whole.ids[: len(sink.ids)]
    assert sink.finished.usage.completion_tokens == len(sink.ids)


def test_text_held_back_is_flushed(tiny: TinyEngine) -> None:
    """The beginning of a stop string that never comes is part of the text after all."""
    whole = tiny.alone(prompt_of(4, 9), max_tokens=40)
    stop = whole.text[-2:] + "\x00never"

    sink = tiny.alone(prompt_of(4, 9), max_tokens=40, stop=(stop,))

    assert sink.text == whole.text
    assert sink.reason is FinishReason.LENGTH


def test_a_bound_that_lies_behind_ends_with_the_first_token(tiny: TinyEngine) -> None:
    """Nobody may ask for less than one token; where one does, the stream ends all the same."""
    sink = tiny.alone(prompt_of(4, 9), max_tokens=0)

    assert (sink.reason, len(sink.ids)) == (FinishReason.LENGTH, 1)


class _Holding:
    """A decoder that gives nothing before the end."""

    def push(self, token_id: int) -> str:
        """Hold it back."""
        del token_id
        return ""

    def finish(self) -> str:
        """Give everything."""
        return "kept" + STOP


@pytest.mark.parametrize("end", ["length", "eos", "stop token"])
def test_a_stop_string_in_the_flushed_tail_is_why_the_stream_ended(folder: Path, end: str) -> None:
    """What was held back may complete a stop string; it is cut out and named, whatever came."""
    prompt = prompt_of(5, 4)
    first, second = tiny_engine(folder).alone(prompt, max_tokens=2).ids
    assert first != second
    ends = frozenset([second])

    sink = tiny_engine(folder, make_decoder=lambda _: _Holding()).alone(
        prompt,
        stop=(STOP,),
        max_tokens=1 if end == "length" else 8,
        eos_ids=ends if end == "eos" else frozenset(),
        stop_token_ids=ends if end == "stop token" else frozenset(),
    )

    finished = sink.finished
    assert (sink.text, sink.ids) == ("kept", [first])
    assert (finished.reason, finished.stop) == (FinishReason.STOP_STRING, STOP)
    assert finished.stop_token_id is None


def test_length_and_context_end_a_stream(tiny: TinyEngine) -> None:
    """Prompt and completion fill the context exactly; max_tokens counts first where both meet."""
    full = tiny.alone(prompt_of(5, 500), max_tokens=None)
    assert (full.reason, len(full.ids)) == (FinishReason.CONTEXT, 12)

    both = tiny.alone(prompt_of(5, 500), max_tokens=12)
    assert (both.reason, both.ids) == (FinishReason.LENGTH, full.ids)

    one = tiny.alone(prompt_of(5, 511), max_tokens=None)
    assert (one.reason, len(one.ids)) == (FinishReason.CONTEXT, 1)


def test_text_is_the_decoding_of_the_ids(tiny: TinyEngine) -> None:
    """Nothing is lost or doubled between ids and text."""
    sink = tiny.alone(prompt_of(6, 20), max_tokens=200)

    replacement = "\N{REPLACEMENT CHARACTER}"
    plain = tiny.tokenizer.decode(sink.ids, skip_special=False)
    assert sink.text.replace(replacement, "") == plain.replace(replacement, "")


def test_a_row_without_numbers_fails_alone(tmp_path: Path) -> None:
    """Logits that are no numbers end that row; its neighbours, and its heir, are untouched."""
    folder = write_tiny_model(tmp_path, nan_token=NAN_TOKEN)
    tiny = tiny_engine(folder, rows_max=2)
    clean = tiny.alone(prompt_of(1, 30)).ids

    _, good = tiny.submit(prompt_of(1, 30))
    _, bad = tiny.submit((*prompt_of(2, 40), NAN_TOKEN))
    tiny.run()
    (event,) = bad.events

    assert isinstance(event, Failed)
    assert isinstance(event.error, InternalError)
    assert good.ids == clean
    assert [tiny.alone(prompt_of(1, 30)).ids for _ in range(2)] == [clean, clean]


class _Broken:
    """A decoder that fails at the third token."""

    def __init__(self) -> None:
        self.left = 3

    def push(self, token_id: int) -> str:
        """Count down, then fail."""
        self.left -= 1
        if self.left == 0:
            raise ValueError(token_id)
        return "a"

    def finish(self) -> str:
        """Hold nothing back."""
        return ""


def test_a_fault_in_one_row_fails_that_row_alone(folder: Path) -> None:
    """A row whose text cannot be made fails with an id for the log; the others go on."""
    decoders: list[TextDecoder] = [_Broken(), _Broken(), _Broken()]
    decoders[1] = tiny_engine(folder).tokenizer.detokenizer()
    model = load_model(inspect_model(folder), form=FloatType.F32, progress=lambda *_: None)
    caches = RowCaches(model.new_caches(), context_max=64, rows_max=4)
    tiny = tiny_engine(folder)
    tiny.caches, tiny.engine = (
        caches,
        Engine(
            model,
            caches,
            lambda _: decoders.pop(0),
            Limits(context_length=64, rows_max=4),
            stepper=choose(model, caches),
        ),
    )

    sinks = [tiny.submit(prompt_of(i, 3))[1] for i in range(3)]
    tiny.run()

    assert [len(sink.ids) for sink in sinks] == [2, 8, 2]
    for sink in (sinks[0], sinks[2]):
        event = sink.events[-1]
        assert isinstance(event, Failed)
        assert isinstance(event.error, InternalError)
    assert caches.rows == ()


class _BrokenSink(Collected):
    """A sink that breaks its contract."""

    def put(self, event: Event) -> None:
        """Fail."""
        raise OSError(event)


def test_a_fault_of_the_loop_leaves_the_step(tiny: TinyEngine) -> None:
    """What concerns no row alone is not swallowed; everybody can still be told."""
    _, other = tiny.submit(prompt_of(1, 3))
    tiny.submit(prompt_of(2, 3), sink=_BrokenSink())

    with pytest.raises(OSError, match="Tokens"):
        tiny.run()
    error = InternalError("id")
    with pytest.raises(OSError, match="Failed"):
        tiny.engine.fail_all(error)
    assert other.events[-1] == Failed(error)
    assert not tiny.engine.busy


def test_usage_adds_up(folder: Path) -> None:
    """Queue, prompt and completion durations follow one another from the submission on."""
    clock = Clock(tick_s=1.0)
    tiny = tiny_engine(folder, clock=clock, chunk=16)
    submitted_s = clock()
    sink = tiny.alone(prompt_of(1, 40), max_tokens=5, submitted_s=submitted_s)

    usage = sink.finished.usage
    assert (usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens) == (40, 0, 5)
    assert usage.queue_s > 0
    assert usage.prompt_s > 0
    assert usage.completion_s > 0
    assert usage.queue_s + usage.prompt_s + usage.completion_s < clock() - submitted_s
    assert usage.seed == GREEDY.seed


def test_occupancy_tells_who_runs_and_waits(folder: Path) -> None:
    """Running and waiting streams, the oldest wait, and the tokens held are of this moment."""
    clock = Clock(tick_s=1.0)
    tiny = tiny_engine(folder, rows_max=1, context_length=128, clock=clock)
    tiny.submit(prompt_of(1, 10), submitted_s=clock())
    tiny.submit(prompt_of(2, 10), submitted_s=clock())
    tiny.engine.step()

    load = tiny.engine.occupancy()
    assert (load.running, load.waiting) == (1, 1)
    assert load.oldest_wait_s > 0
    assert (load.kv_tokens_used, load.kv_tokens_capacity) == (10, 128)
    tiny.run()
    assert tiny.engine.occupancy().kv_tokens_used == 0


def test_release_all_frees_what_fail_all_keeps(tiny: TinyEngine) -> None:
    """An operator's end gives every row back and tells running and waiting streams why."""
    sinks = [tiny.submit(prompt_of(i, 3))[1] for i in range(6)]
    tiny.engine.step()
    error = InternalError("id")

    tiny.engine.release_all(error)

    assert [sink.events[-1] for sink in sinks] == [Failed(error)] * 6
    assert tiny.caches.rows == ()
    assert len(tiny.alone(prompt_of(1, 3)).ids) == 8
