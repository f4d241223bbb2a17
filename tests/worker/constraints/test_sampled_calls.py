"""Calls that a model of random weights makes: sound where a grammar holds them, none without."""

# ruff: noqa: RUF001 - letters of the models' own

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mlxd_shared.domain.requests import FinishReason, Sampling
from mlxd_worker.chat.parsing.pieces import Begin
from mlxd_worker.constraints.calls.grammar import marks_of
from mlxd_worker.engine.masks.calls import CallConstraint
from mlxd_worker.kernels.device import runs_cpu
from tests.support.effort import examples
from tests.support.engines import Collected, TinyEngine, tiny_engine
from tests.support.tiny_model import VOCAB
from tests.worker.constraints.dialects import (
    WRITTEN,
    Speech,
    calls_of,
    check_calls,
    load_speech,
    write_marked_model,
)
from tests.worker.made_tokenizers import EOS_ID

CALLS = examples(100, few=8, in_ci=40)
ROWS_MAX, CONTEXT = 32, 1024
BIAS = 8.0
"""For what ends a text, which random weights would go on with for ever."""
ENDS = ('"', "}", "/", "!</", "</parameter>", "</arg_value>", "</think>", "[/THINK]", "<|end|>",
        "｜DSML｜")  # fmt: skip
PROMPT = [3, 4, 5]


@pytest.fixture(scope="module", name="folder")
def made_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model."""
    return write_marked_model(tmp_path_factory.mktemp("marked"))


@pytest.fixture(scope="module", name="tiny")
def made_tiny(folder: Path) -> TinyEngine:
    """An engine on it."""
    return tiny_engine(folder, rows_max=ROWS_MAX, context_length=CONTEXT, waiting_max=256)


@pytest.fixture(name="speech", params=[*WRITTEN])
def made_speech(request: pytest.FixtureRequest, folder: Path) -> Speech:
    """Each dialect."""
    return load_speech(request.param, folder)


def sampling_of(speech: Speech, seed: int, *, toward: str = "") -> Sampling:
    """Return plain draws, with a bias for what ends texts, and for one mark."""
    ids = (speech.tokenizer.encode(text, begin_text=False, parse_special=True) for text in ENDS)
    biased = {own[0] for own in ids if len(own) == 1}
    if toward:
        biased.add(speech.control.ids[toward])
    bias = tuple((token_id, BIAS) for token_id in sorted(biased))
    return Sampling(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=seed, logit_bias=bias)


def submit(tiny: TinyEngine, speech: Speech, seed: int, **options: Any) -> Collected:
    """Submit one stream."""
    fields = {
        "sampling": sampling_of(speech, seed),
        "eos_ids": frozenset({EOS_ID}),
        "shown": speech.shown,
        **options,
    }
    return tiny.submit(PROMPT, **fields)[1]


def watch(speech: Speech, **fields: Any) -> CallConstraint:
    """Return a grammar that sleeps until a call begins."""
    grammar = speech.constraints.compile(speech.format_of(**fields))
    marks = marks_of(speech.output, Begin())
    return speech.constraints.watch(grammar, marks, ends=not fields.get("several", True))


@pytest.mark.parametrize("several", [True, False])
def test_every_required_call_is_sound(tiny: TinyEngine, speech: Speech, *, several: bool) -> None:
    """Each answer is calls and nothing else, and strict arguments match.

    Of a hundred some few are in a text that random weights do not end within the context.
    """
    constraint = speech.constraints.compile(speech.format_of(required=True, several=several))
    sinks = [
        submit(
            tiny,
            speech,
            seed,
            sampling=sampling_of(speech, seed, toward="</s>"),
            constraint=constraint,
            max_tokens=CONTEXT - len(PROMPT),
        )
        for seed in range(-(-CALLS // 2))
    ]
    tiny.run()

    ended = [sink for sink in sinks if sink.reason is not FinishReason.LENGTH]
    assert len(ended) >= 0.95 * len(sinks)
    for sink in ended:
        assert sink.reason is FinishReason.EOS, sink.text
        check_calls(speech.read(sink.text), several=several)


def test_without_a_grammar_there_is_no_call(tiny: TinyEngine, speech: Speech) -> None:
    """The control: what random weights write by themselves is none."""
    sinks = [submit(tiny, speech, seed, max_tokens=24) for seed in range(CALLS)]
    tiny.run()

    assert not [sink for sink in sinks if calls_of(speech.read(sink.text))]


def test_a_grammar_asleep_leaves_text_alone(tiny: TinyEngine, speech: Speech) -> None:
    """Bit for bit the tokens of a stream without one, and steps run ahead as often."""
    ids, aheads = [], []
    for constraint in (None, watch(speech)):
        sink = submit(tiny, speech, 1, constraint=constraint, max_tokens=24)
        ahead = []
        while tiny.engine.busy:
            tiny.engine.step()
            ahead.append(tiny.plain.ahead)
        ids.append(sink.drawn)
        aheads.append(ahead)

    assert not calls_of(speech.read(sink.text))
    assert ids[0] == ids[1]
    assert any(aheads[0]) or not runs_cpu()
    assert aheads[0] == aheads[1]


OPENED = [name for name in WRITTEN if name not in ("deepseek_v3_2", "deepseek_v4", "harmony")]
"""Those that begin calls with one token."""


@pytest.mark.parametrize("name", OPENED)
def test_a_call_is_held_from_its_mark_on(tiny: TinyEngine, folder: Path, name: str) -> None:
    """Up to the mark the text is that of a stream without a grammar; behind it comes a call."""
    speech = load_speech(name, folder)
    constraint = watch(speech, several=False)
    opening = constraint.marks.opening.decode()
    mark_id = speech.control.ids[opening]
    streams = [
        {"sampling": sampling_of(speech, seed, toward=opening), "max_tokens": 800}
        for seed in range(4)
    ]
    held = [submit(tiny, speech, 0, constraint=constraint, **stream) for stream in streams]
    free = [submit(tiny, speech, 0, **{**stream, "max_tokens": 200}) for stream in streams]
    tiny.run()

    for with_grammar, without in zip(held, free, strict=True):
        at = with_grammar.ids.index(mark_id)
        assert with_grammar.ids[: at + 1] == without.ids[: at + 1]
        if name != "llama3":  # its parser knows a call by the answer's beginning alone
            assert len(calls_of(speech.read(with_grammar.text))) == 1
        assert with_grammar.reason is FinishReason.EOS


@pytest.mark.parametrize("forces", [False, True])
def test_a_stream_with_a_call_resumes_anywhere(
    tiny: TinyEngine, folder: Path, *, forces: bool
) -> None:
    """Cut in text, in a mark's sight or in a call, it goes on with the tokens that it had."""
    speech = load_speech("hermes", folder)
    options: dict[str, Any] = {
        "sampling": sampling_of(speech, 2, toward="<tool_call>"),
        "constraint": watch(speech),
        "max_tokens": 60,
    }
    whole = submit(tiny, speech, 0, **options)
    tiny.run()
    ids = whole.ids
    assert speech.control.ids["<tool_call>"] in ids
    for cut in range(1, len(ids), 11):
        so_far = tuple(ids[:cut])
        again = {"forced": so_far} if forces else {"resumed": cut}
        prompt = PROMPT if forces else [*PROMPT, *so_far]
        fields = {"eos_ids": frozenset({EOS_ID}), "shown": speech.shown, **options, **again}
        sink = tiny.submit(prompt, **fields)[1]
        tiny.run()
        assert sink.ids == ids[cut:]


def test_the_vocabulary_is_the_models(folder: Path) -> None:
    """Every mark is a token, so that each way to name one is tried."""
    assert load_speech("hermes", folder).tokenizer.vocab_size <= VOCAB
