"""A row whose masks take long keeps nobody waiting, and is ended where they take too long."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlxd_shared import config
from mlxd_shared.domain.errors import InvalidRequest, ModelUnloaded
from mlxd_shared.domain.formats import FormatKind, ResponseFormat
from mlxd_shared.domain.requests import FinishReason, Sampling
from mlxd_worker.constraints.compiler import TRIAL, Constraints
from mlxd_worker.engine.masks.constraint import Constraint
from mlxd_worker.engine.request import Failed, StreamId, Submit
from mlxd_worker.killable.pool import Pool
from mlxd_worker.tokenizing.files import load_tokenizer
from tests.support.clocks import Clock
from tests.support.engine_threads import running_engine
from tests.support.engines import GREEDY, Collected, TinyEngine, tiny_engine
from tests.support.held_masks import SLOW_AT_ONCE, SLOW_BEHIND, Gate, hold_masks
from tests.support.tiny_model import VOCAB, write_tiny_model
from tests.worker.made_tokenizers import EOS_ID

PLAIN = '{"type": "array", "items": {"type": "integer"}, "minItems": 60}'
PROMPT = (3, 4)
BESIDE = 40


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model."""
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def tiny(folder: Path) -> TinyEngine:
    """An engine on it."""
    return tiny_engine(folder)


@pytest.fixture(scope="module")
def compiled(folder: Path) -> Callable[[FormatKind, str], Constraint]:
    """What compiles formats for it."""
    constraints = Constraints(load_tokenizer(folder), VOCAB)
    return lambda kind, text: constraints.compile(ResponseFormat(kind, text))


@pytest.fixture(scope="module")
def plain(compiled: Callable[[FormatKind, str], Constraint]) -> Constraint:
    """A constraint whose masks are quick."""
    return compiled(FormatKind.JSON_SCHEMA, PLAIN)


def request_fields(constraint: Constraint, **options: Any) -> dict[str, Any]:
    """Return what a constrained stream asks for."""
    sampling = Sampling(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=5)
    eos = frozenset({EOS_ID})
    return {
        "constraint": constraint, "sampling": sampling, "eos_ids": eos, "max_tokens": 30, **options
    }  # fmt: skip


def step_until(tiny: TinyEngine, over: Callable[[], bool]) -> int:
    """Step until something is so; return how many steps that took."""
    for steps in itertools.count():
        if over():
            return steps
        tiny.engine.step()
        assert steps < 5000
    raise AssertionError


def violation_of(sink: Collected) -> tuple[str, str]:
    """Return the field and the words that a stream was ended with."""
    last = sink.events[-1]
    assert isinstance(last, Failed)
    assert isinstance(last.error, InvalidRequest), last.error
    (violation,) = last.error.violations
    return violation.field, violation.description


def test_others_step_on_while_a_mask_is_made(tiny: TinyEngine, plain: Constraint) -> None:
    """A neighbour gets all of its tokens, one a step; then the row goes on as if alone."""
    alone = tiny.alone(PROMPT, **request_fields(plain)).ids
    neighbours = tiny.alone((5, 6), max_tokens=BESIDE).ids
    gate = Gate()
    _, slow = tiny.submit(PROMPT, **request_fields(hold_masks(plain, gate)))
    step_until(tiny, gate.reached.is_set)
    ids_before = list(slow.ids)
    _, neighbour = tiny.submit((5, 6), max_tokens=BESIDE)

    assert step_until(tiny, lambda: neighbour.ended) <= BESIDE + 2
    assert neighbour.ids == neighbours
    assert slow.ids == ids_before == alone[: len(ids_before)]
    assert not slow.ended
    gate.go.set()
    tiny.run()
    assert slow.ids == alone


def test_quick_masks_are_made_beside_slow_ones(tiny: TinyEngine, plain: Constraint) -> None:
    """Constrained streams, too, go on while the thread that makes their masks is in a slow one."""
    alone = tiny.alone(PROMPT, **request_fields(plain)).ids
    gates = [Gate(at=at) for at in (2, 4)]
    slow = [tiny.submit(PROMPT, **request_fields(hold_masks(plain, gate)))[1] for gate in gates]
    step_until(tiny, lambda: all(gate.reached.is_set() for gate in gates))
    _, neighbour = tiny.submit(PROMPT, **request_fields(plain))

    step_until(tiny, lambda: neighbour.ended)
    assert neighbour.ids == alone
    assert not any(sink.ended for sink in slow)
    for gate in gates:
        gate.go.set()
    tiny.run()
    assert [sink.ids for sink in slow] == [alone, alone]


def test_a_stream_is_cancelled_while_its_mask_is_made(tiny: TinyEngine, plain: Constraint) -> None:
    """Its row is free at once, and nothing more is done for it once the call at hand is over."""
    gate = Gate()
    request, slow = tiny.submit(PROMPT, **request_fields(hold_masks(plain, gate)))
    step_until(tiny, gate.reached.is_set)
    count_before = len(slow.events)
    tiny.engine.cancel(request.stream)

    assert not tiny.engine.busy
    assert tiny.caches.rows == ()
    assert tiny.alone((5, 6), max_tokens=BESIDE).reason is FinishReason.LENGTH
    gate.go.set()
    assert gate.left.wait(60)
    assert len(slow.events) == count_before


def test_a_stream_whose_mask_takes_too_long_is_ended(folder: Path, plain: Constraint) -> None:
    """The field and the limit are named, though nothing can end the call; neighbours go on."""
    clock, gate = Clock(), Gate()
    tiny = tiny_engine(folder, clock=clock)
    limited = replace(plain, field="response_format.ebnf_grammar")
    _, slow = tiny.submit(PROMPT, **request_fields(hold_masks(limited, gate, mask_s=7.0)))
    _, neighbour = tiny.submit((5, 6), max_tokens=BESIDE)
    step_until(tiny, gate.reached.is_set)
    clock.now_s += 6.9
    tiny.engine.step()
    assert not slow.ended
    clock.now_s += 0.2
    tiny.engine.step()

    field, words = violation_of(slow)
    assert field == "response_format.ebnf_grammar"
    assert "7 s" in words
    tiny.run()
    assert neighbour.reason is FinishReason.LENGTH
    assert tiny.caches.rows == ()
    gate.go.set()


def test_all_masks_of_a_stream_have_a_budget(tiny: TinyEngine, plain: Constraint) -> None:
    """A stream is ended with the mask that exceeds it; without a limit it goes on."""
    field, words = violation_of(tiny.alone(PROMPT, **request_fields(replace(plain, stream_s=0.0))))

    assert field == "response_format.json_schema"
    assert "masks, 1 so far, exceed 0 s" in words
    assert tiny.alone(PROMPT, **request_fields(plain)).reason is FinishReason.LENGTH
    assert plain.stream_s == config.CONSTRAINT_STREAM_S
    assert plain.mask_s == config.CONSTRAINT_MASK_S


@pytest.mark.parametrize("by", ["max_tokens", "constraint", "stop"])
def test_a_stream_waits_for_no_mask_behind_its_last_token(
    tiny: TinyEngine, plain: Constraint, compiled: Callable[[FormatKind, str], Constraint], by: str
) -> None:
    """Whatever ends it: its end comes while that mask is held, and no sooner than otherwise."""
    constraint, options = plain, dict[str, Any](max_tokens=4)
    if by == "constraint":
        constraint, options = compiled(FormatKind.REGEX, "[ab]{3}"), {}
    elif by == "stop":
        whole = tiny.alone(PROMPT, **request_fields(plain))
        options = {"stop": (whole.text[:5],)}
    expected = tiny.alone(PROMPT, **request_fields(constraint, **options))
    tokens = expected.finished.usage.completion_tokens
    gate = Gate(at=tokens - 1)
    _, sink = tiny.submit(PROMPT, **request_fields(hold_masks(constraint, gate), **options))

    step_until(tiny, lambda: sink.ended)
    assert (sink.ids, sink.text, sink.outcome) == (expected.ids, expected.text, expected.outcome)
    assert by == "stop" or not gate.reached.is_set(), "a mask that nobody draws by"
    assert tiny.caches.rows == ()
    gate.go.set()


@pytest.mark.parametrize("by", ["max_tokens", "stop"])
def test_a_stream_fails_by_no_mask_behind_its_last_token(
    tiny: TinyEngine, plain: Constraint, by: str
) -> None:
    """Where that mask would exceed its bounds the stream ends well; one that goes on is told."""
    expected = tiny.alone(PROMPT, **request_fields(plain))
    ends = {"max_tokens": 4} if by == "max_tokens" else {"stop": (expected.text[:5],)}
    well = tiny.alone(PROMPT, **request_fields(plain, **ends))
    at = well.finished.usage.completion_tokens - 1
    error = InvalidRequest.of(plain.field, "too much")
    ended, going_on = (
        tiny.alone(PROMPT, **request_fields(hold_masks(plain, failing(at, error)), **options))
        for options in (ends, {})
    )

    assert (ended.ids, ended.text, ended.outcome) == (well.ids, well.text, well.outcome)
    assert going_on.ids == expected.ids[: at + 1], "what its masks have allowed is told"
    assert violation_of(going_on) == (plain.field, "too much")


def failing(at: int, error: Exception) -> Gate:
    """Return an open gate at which a mask fails."""
    gate = Gate(at=at, error=error)
    gate.go.set()
    return gate


def test_a_stream_whose_only_token_exceeds_the_budget_ends_well(
    tiny: TinyEngine, plain: Constraint
) -> None:
    """Nothing is drawn behind it, so nothing is spent on that."""
    spent = replace(plain, stream_s=0.0)

    assert tiny.alone(PROMPT, **request_fields(spent, max_tokens=1)).reason is FinishReason.LENGTH
    assert isinstance(tiny.alone(PROMPT, **request_fields(spent, max_tokens=2)).events[-1], Failed)


def test_where_no_token_may_follow_the_format_is_named(tiny: TinyEngine, plain: Constraint) -> None:
    """By the field of its kind, as its other errors are; but for a lower bound of its own."""
    nothing = replace(plain, first_mask=bytes(len(plain.first_mask)), field="response_format.regex")
    field, words = violation_of(tiny.alone(PROMPT, **request_fields(nothing)))

    assert field == "response_format.regex"
    assert words == "no token of the vocabulary may follow after 0 tokens"
    assert (
        violation_of(tiny.alone(PROMPT, **request_fields(nothing, min_tokens=2)))[0] == "min_tokens"
    )


def test_a_grammar_that_is_slow_at_once_is_refused(folder: Path) -> None:
    """Its trial ends at a count of the library's, by its field on the wire."""
    constraints, trials = Constraints(load_tokenizer(folder), VOCAB), Pool(TRIAL)
    try:
        with pytest.raises(InvalidRequest, match="max is 500") as caught:
            constraints.compile(ResponseFormat(FormatKind.EBNF_GRAMMAR, SLOW_AT_ONCE), trials)
    finally:
        trials.close()
    assert caught.value.violations[0].field == "response_format.ebnf_grammar"


def test_a_grammar_that_is_slow_further_on_ends_its_stream(
    tiny: TinyEngine, compiled: Callable[[FormatKind, str], Constraint]
) -> None:
    """After the same number of tokens each time, by a count: beside others, alone and resumed."""
    slow = compiled(FormatKind.EBNF_GRAMMAR, SLOW_BEHIND)
    options = request_fields(slow, max_tokens=400, min_tokens=400)
    _, beside = tiny.submit(PROMPT, **options)
    _, neighbour = tiny.submit((5, 6), max_tokens=200)
    tiny.run()

    assert neighbour.reason is FinishReason.LENGTH
    field, words = violation_of(beside)
    assert field == "response_format.ebnf_grammar"
    assert "max is 500" in words
    assert 40 < len(beside.ids) < 200
    alone = tiny.alone(PROMPT, **options)
    assert (alone.ids, violation_of(alone)) == (beside.ids, (field, words))
    kept = len(alone.ids) - 2
    rest = tiny.alone((*PROMPT, *alone.ids[:kept]), resumed=kept, **options)
    assert (rest.ids, violation_of(rest)) == (alone.ids[kept:], (field, words))


@pytest.mark.parametrize("by_steps", [False, True])
def test_a_resumed_stream_catches_up_beside_others(
    tiny: TinyEngine, plain: Constraint, *, by_steps: bool
) -> None:
    """What its constraint makes of the tokens so far keeps nobody waiting either."""
    whole, gate = tiny.alone(PROMPT, **request_fields(plain)), Gate(at=6)
    ids = tuple(whole.ids[:12])
    prompt = PROMPT if by_steps else (*PROMPT, *ids)
    options: dict[str, Any] = {"forced": ids} if by_steps else {"resumed": 12}
    _, rest = tiny.submit(prompt, **request_fields(hold_masks(plain, gate)), **options)
    step_until(tiny, gate.reached.is_set)
    _, neighbour = tiny.submit((5, 6), max_tokens=BESIDE)

    assert step_until(tiny, lambda: neighbour.ended) <= BESIDE + 2
    assert rest.ids == []
    gate.go.set()
    tiny.run()
    assert rest.ids == whole.ids[12:]


@pytest.mark.asyncio
async def test_a_model_is_unloaded_while_a_mask_is_made(folder: Path, plain: Constraint) -> None:
    """The stream is told, the model goes and another one comes; the call at hand ends by itself."""
    gate, sink = Gate(), Collected()
    async with running_engine() as started:
        await started.load(folder)
        fields = request_fields(hold_masks(plain, gate))
        request = Submit(
            StreamId(1),
            PROMPT,
            GREEDY,
            30,
            time.monotonic(),
            sink,
            eos_ids=fields["eos_ids"],
            skip_special_tokens=False,
            constraint=fields["constraint"],
        )
        started.engine.submit(request)
        assert await asyncio.to_thread(gate.reached.wait, 60)
        await started.engine.unload(ModelUnloaded("tiny"))

        last = sink.events[-1]
        assert isinstance(last, Failed)
        assert isinstance(last.error, ModelUnloaded)
        assert not gate.left.is_set()
        await started.load(folder)
        gate.go.set()
        assert await asyncio.to_thread(gate.left.wait, 60)
        assert not started.faults


def test_a_schema_may_have_more_at_a_place_than_a_grammar(
    compiled: Callable[[FormatKind, str], Constraint],
) -> None:
    """Its parts cannot be read in several ways, and objects with hundreds of members are real."""
    members = {"type": "object", "properties": {f"a{i}": {} for i in range(300)}}
    constraint = compiled(FormatKind.JSON_SCHEMA, json.dumps(members))

    assert constraint.field == "response_format.json_schema"
    assert constraint.start().try_accept(next(iter(allowed_ids(constraint))))


def allowed_ids(constraint: Constraint) -> list[int]:
    """Return the tokens that an output may begin with."""
    mask = constraint.first_mask
    return [i for i in range(VOCAB) if mask[i >> 3] >> (i & 7) & 1]
