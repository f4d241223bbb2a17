"""A stream that broke off goes on from any cut as if it had not, or is refused by name."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxd_shared.domain.errors import InvalidRequest
from mlxd_shared.domain.formats import FormatKind, ResponseFormat
from mlxd_shared.domain.requests import FinishReason, Sampling
from mlxd_worker.constraints.compiler import Constraints
from mlxd_worker.engine.masks.constraint import Constraint
from mlxd_worker.engine.request import Failed
from mlxd_worker.models.base import Model
from mlxd_worker.text.tokenizer import Tokenizer
from mlxd_worker.tokenizing.files import load_tokenizer
from tests.support.effort import examples, spread_evenly
from tests.support.engine_programs import FORMATS
from tests.support.engines import GREEDY, Collected, TinyEngine, engine_on
from tests.support.remembering import MEMORIES, tokens_of
from tests.support.resuming import Tally, compare_resumed, cuts_of, resumed_prompt
from tests.support.tiny_model import write_tiny_model
from tests.worker.engine.speculation.guessing import eager
from tests.worker.made_tokenizers import BOS_ID, EOS_ID
from tests.worker.tiny import load

CONTEXT = 512
CUTS, CUTS_IN_CI = 9, 12
"""At how many places of a stream it breaks off; in `make soak` at every one."""
HOT = Sampling(temperature=1.5, top_k=0, top_p=1.0, min_p=0.0, seed=5)
REPEATING = ((60, 99.0), (61, 99.0))
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "maximum": 99}, "b": {"enum": ["x", "yy"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}

samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.8, 1.5]),
    top_k=st.sampled_from([0, 1, 40]),
    top_p=st.sampled_from([1.0, 0.9]),
    min_p=st.sampled_from([0.0, 0.1]),
    seed=st.integers(0, 9),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    presence_penalty=st.sampled_from([0.0, 0.5]),
    frequency_penalty=st.sampled_from([0.0, 0.3]),
    repeat_last_n=st.sampled_from([64, 8, -1]),
    xtc_probability=st.sampled_from([0.0, 0.5]),
    logit_bias=st.sampled_from([(), ((70, 3.0), (90, -2.0)), REPEATING]),
)


@dataclass(frozen=True, slots=True)
class Asked:
    """A stream, where it is cut, and what it meets when it goes on."""

    length: int
    sampling: Sampling
    max_tokens: int | None
    min_tokens: int
    ends: bool
    wanted: ResponseFormat | None
    top_logprobs: int | None
    guesses: int
    stops: bool
    skip_special: bool
    cuts: tuple[float, ...]
    warm: bool
    """Whether the engine remembers the whole stream."""
    neighbours: int
    by_steps: bool


asked_streams = st.builds(
    Asked,
    length=st.sampled_from((1, 5, 31, 64, 200, 250)),
    sampling=samplings,
    max_tokens=st.sampled_from([40, 12, 2]),
    min_tokens=st.sampled_from([0, 0, 2]),
    ends=st.booleans(),
    wanted=st.sampled_from([None, None, None, *FORMATS]),
    top_logprobs=st.sampled_from([None, None, 2]),
    guesses=st.sampled_from([0, 8]),
    stops=st.booleans(),
    skip_special=st.booleans(),
    cuts=st.lists(st.floats(0, 1, exclude_max=True), min_size=1, max_size=3).map(tuple),
    warm=st.booleans(),
    neighbours=st.integers(0, 2),
    by_steps=st.booleans(),
)


class Resumed:
    """A model, an engine that remembers and one that does not, and comparisons on them."""

    def __init__(self, model: Model, tokenizer: Tokenizer) -> None:
        self._constraints = Constraints(tokenizer, model.vocab_size)
        self.cold, self.warm = (
            engine_on(
                model,
                tokenizer,
                rows_max=3,
                context_length=CONTEXT,
                chunk=32,
                prefix_nbytes=nbytes,
                controller=eager(),
            )
            for nbytes in (0, 1 << 22)
        )
        self.tally = Tally()

    def check(self, case: Asked) -> None:
        """Run a stream whole, then from each of its cuts."""
        prompt = tokens_of(7, case.length)
        options = self._arguments_for(case)
        if case.stops:
            text = self.cold.alone(prompt, **options).text
            # One holds text back in vain, the other ends the stream.
            options["stop"] = (text[3:5] + "\0", text[-4:] or "none")
        whole = self.cold.alone(prompt, **options)
        tiny = self.warm if case.warm else self.cold
        if case.warm:
            tiny.alone(prompt, **options)
        possible = cuts_of(whole)
        for part in case.cuts if possible else ():
            cut = possible[int(part * len(possible))]
            others = [
                tiny.submit(tokens_of(20 + n, 40 * n + 3), max_tokens=12)[1]
                for n in range(case.neighbours)
            ]
            for _ in range(2):
                tiny.engine.step()
            resumed = resumed_prompt(prompt, whole, cut, by_steps=case.by_steps)
            _, rest = tiny.submit(**resumed, **options)
            tiny.run()
            compare_resumed(whole, rest, cut=cut, tally=self.tally)
            assert all(len(sink.ids) == 12 for sink in others)

    def _arguments_for(self, case: Asked) -> dict[str, Any]:
        ends = frozenset((EOS_ID,)) if case.ends or case.wanted else frozenset()
        constraint = None
        if case.wanted is not None:
            kept = self._constraints.find_kept(case.wanted)
            constraint = kept or self._constraints.compile(case.wanted)
        return {
            "sampling": case.sampling,
            "max_tokens": case.max_tokens,
            "min_tokens": min(case.min_tokens, case.max_tokens or 99),
            "eos_ids": ends,
            "stop_token_ids": frozenset(range(40, 60)) if case.ends else frozenset(),
            "top_logprobs": case.top_logprobs,
            "constraint": constraint,
            "speculation_depth": case.guesses,
            "skip_special_tokens": case.skip_special,
        }


@pytest.mark.parametrize("memory", spread_evenly(list(MEMORIES), 2))
def test_any_stream_goes_on_from_any_cut(memory: str, tmp_path: Path) -> None:
    """Whatever it asks for, whoever runs beside it, and whatever is remembered: the same tokens,
    the same text and the same end, and near ties are as rare as they must be.
    """
    folder = MEMORIES[memory](tmp_path / memory)
    resumed = Resumed(load(folder), load_tokenizer(folder))

    @settings(max_examples=examples(25, few=4, in_ci=8))
    @given(asked_streams)
    def check(case: Asked) -> None:
        resumed.check(case)

    check()
    tally = resumed.tally
    assert min(tally.cuts, tally.tokens, tally.reused) > 0, str(tally)
    assert tally.diverged <= max(1.0, tally.tokens * 1e-4), str(tally)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model whose tokens are mostly single bytes."""
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def tiny(folder: Path) -> TinyEngine:
    """An engine on it."""
    return engine_on(load(folder), load_tokenizer(folder), rows_max=4, context_length=CONTEXT)


@pytest.fixture(scope="module")
def constraint(folder: Path) -> Constraint:
    """A schema for its vocabulary."""
    tokenizer = load_tokenizer(folder)
    wanted = ResponseFormat(FormatKind.JSON_SCHEMA, json.dumps(SCHEMA))
    return Constraints(tokenizer, tokenizer.vocab_size).compile(wanted)


def at_cuts(tiny: TinyEngine, prompt: tuple[int, ...], **options: Any) -> Collected:
    """Check the cuts of one stream; return the whole one."""
    whole = tiny.alone(prompt, **options)
    tally = Tally()
    for cut in spread_evenly(cuts_of(whole), CUTS, in_ci=CUTS_IN_CI):
        for by_steps in (False, True):
            resumed = resumed_prompt(prompt, whole, cut, by_steps=by_steps)
            rest = tiny.alone(**resumed, **options)
            compare_resumed(whole, rest, cut=cut, tally=tally)
    assert tally.diverged == 0, str(tally)
    return whole


def test_characters_of_several_tokens_are_completed(tiny: TinyEngine) -> None:
    """Where a cut is in the middle of a character, the rest of the stream brings all of it."""
    # The three bytes of a character, one token each, drawn one after the other.
    tokenizer = tiny.tokenizer
    sun = [i for i, piece in tokenizer.pieces().items() if piece in (b"\xe2", b"\x98", b"\x80")]
    assert len(sun) == 3
    bias = tuple((token, 30.0) for token in sun)
    whole = at_cuts(tiny, (5, 6), sampling=replace(HOT, logit_bias=bias), max_tokens=60)

    texts = [event.text for event in whole.events if not isinstance(event, Failed)]
    assert "" in texts, "text was held back"
    assert "☀" in whole.text


@pytest.mark.parametrize("seed", spread_evenly(range(3), 1))
def test_text_that_may_become_a_stop_string_is_held_back_again(tiny: TinyEngine, seed: int) -> None:
    """Whether a stop string is completed behind the cut, or never, or may not end it yet."""
    sampling = replace(HOT, seed=seed)
    text = tiny.alone((5, 6), sampling=sampling, max_tokens=40).text
    middle = len(text) // 2

    ended = at_cuts(tiny, (5, 6), sampling=sampling, max_tokens=40, stop=(text[middle:][:5],))
    assert ended.reason is FinishReason.STOP_STRING
    vain = at_cuts(tiny, (5, 6), sampling=sampling, max_tokens=40, stop=(text[3:9] + "\0",))
    assert (vain.text, vain.reason) == (text, FinishReason.LENGTH)
    early = {"stop": (text[2:4], text[3:9] + "\0"), "min_tokens": 20}
    at_cuts(tiny, (5, 6), sampling=sampling, max_tokens=40, **early)


@pytest.mark.parametrize("seed", spread_evenly(range(3), 1))
def test_a_constraint_goes_on_where_it_stood(
    tiny: TinyEngine, constraint: Constraint, seed: int
) -> None:
    """From each cut the output is completed to the same text."""
    whole = at_cuts(
        tiny,
        (3, 4),
        sampling=replace(HOT, temperature=1.0, seed=seed),
        max_tokens=400,
        constraint=constraint,
        eos_ids=frozenset((EOS_ID,)),
    )

    assert whole.reason is FinishReason.EOS
    assert set(json.loads(whole.text)) == {"a", "b"}


def refusal(sink: Collected) -> tuple[str, str]:
    """The field and the words with which a stream was refused, before anything else."""
    (event,) = sink.events
    assert isinstance(event, Failed)
    assert isinstance(event.error, InvalidRequest), event.error
    (violation,) = event.error.violations
    return violation.field, violation.description


def test_tokens_that_cannot_have_come_are_named(tiny: TinyEngine, constraint: Constraint) -> None:
    """The first of them, and why; rows beside it and the next request do not notice."""
    options: dict[str, Any] = {"constraint": constraint, "eos_ids": frozenset((EOS_ID,))}
    _, beside = tiny.submit((5, 6), max_tokens=30)
    whole = tiny.alone((3, 4), max_tokens=400, **options)

    wrong = [*whole.ids[:2], 100]
    for index, ids in ((2, wrong), (0, [BOS_ID, *whole.ids[:2]]), (1, [whole.ids[0], BOS_ID])):
        field, words = refusal(
            tiny.alone((3, 4, *ids), resumed=len(ids), max_tokens=400, **options)
        )
        assert field == f"resume_token_ids[{index}]"
        assert "response_format" in words
        forced = tiny.alone((3, 4), forced=tuple(ids), max_tokens=400, **options)
        assert refusal(forced) == (field, words)
    ended = tiny.alone((3, 4, *whole.ids), resumed=len(whole.ids), max_tokens=400, **options)
    assert refusal(ended)[0] == f"resume_token_ids[{len(whole.ids) - 1}]"
    plain = tiny.alone((5, 6), max_tokens=30)
    assert plain.ids == beside.ids
    stop = plain.text[4:6]
    texts = [event.text for event in plain.events if not isinstance(event, Failed)]
    place = next(i for i in range(30) if stop in "".join(texts[: i + 1]))
    stopped = tiny.alone((5, 6, *plain.ids), resumed=30, max_tokens=31, stop=(stop,))
    assert refusal(stopped)[0] == f"resume_token_ids[{place}]"
    tiny.rest()
    assert tiny.caches.nbytes == 0
    assert tiny.alone((5, 6), max_tokens=30).ids == plain.ids


def test_a_turn_after_a_resumed_stream_costs_its_new_tokens(folder: Path) -> None:
    """What a resumed stream has evaluated is kept like any other's."""
    tiny = engine_on(
        load(folder),
        load_tokenizer(folder),
        rows_max=2,
        context_length=CONTEXT,
        prefix_nbytes=1 << 22,
    )
    prompt = tokens_of(1, 100)
    whole = tiny.alone(prompt, max_tokens=40)
    tiny.prefix.shrink(0)
    rest = tiny.alone((*prompt, *whole.ids[:15]), resumed=15, max_tokens=40)
    assert rest.ids == whole.ids[15:]

    turn = tiny.alone((*prompt, *whole.ids, *tokens_of(2, 20))).finished.usage
    assert turn.prompt_tokens - turn.cached_tokens == 21


def test_the_prompt_is_counted_once(tiny: TinyEngine) -> None:
    """The output so far is no part of the prompt, and all of the output is counted."""
    prompt = tokens_of(1, 50)
    whole = tiny.alone(prompt, max_tokens=20)
    usage = tiny.alone((*prompt, *whole.ids[:8]), resumed=8, max_tokens=20).finished.usage

    assert (usage.prompt_tokens, usage.completion_tokens) == (50, 20)
    assert usage.near_ties == 0


def test_near_ties_of_resumed_streams_are_counted(tiny: TinyEngine) -> None:
    """Two tokens that a bias makes equal are too near to call at each draw; others are not told."""
    first = tiny.alone((5, 6), top_logprobs=2, max_tokens=2)
    best, other = first.logprobs[1].top
    options: dict[str, Any] = {
        "sampling": replace(GREEDY, logit_bias=((other.token_id, best.logprob - other.logprob),)),
        "max_tokens": 2,
    }

    resumed = tiny.alone((5, 6, *first.ids[:1]), resumed=1, **options)
    assert resumed.finished.usage.near_ties == 1
    fresh = tiny.alone((5, 6, *first.ids[:1]), **{**options, "max_tokens": 1})
    assert fresh.finished.usage.near_ties == 0
