"""Streams under a constraint: how they end, and that a cut one is told apart."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mlxd_shared.domain.formats import FormatKind, ResponseFormat
from mlxd_shared.domain.requests import FinishReason, Sampling
from mlxd_worker.constraints.compiler import Constraints
from mlxd_worker.engine.masks.constraint import Constraint
from tests.support.engines import TinyEngine, tiny_engine
from tests.support.tiny_model import VOCAB, write_tiny_model
from tests.worker.made_tokenizers import EOS_ID

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "maximum": 99}, "b": {"enum": ["x", "yy"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
EOS = frozenset({EOS_ID})


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyEngine:
    """An engine on random weights, whose own text is nonsense."""
    return tiny_engine(write_tiny_model(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="module")
def constraint(tiny: TinyEngine) -> Constraint:
    """The schema, compiled for the engine's vocabulary."""
    wanted = ResponseFormat(FormatKind.JSON_SCHEMA, json.dumps(SCHEMA))
    return Constraints(tiny.tokenizer, VOCAB).compile(wanted)


def sampling(seed: int) -> Sampling:
    """Return plain draws."""
    return Sampling(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=seed)


@pytest.mark.parametrize("seed", range(4))
def test_a_cut_by_the_number_of_tokens_is_told(
    tiny: TinyEngine, constraint: Constraint, seed: int
) -> None:
    """Whatever ends before it is complete ends as `length`; what is complete, as by an EOS."""
    options = {"sampling": sampling(seed), "constraint": constraint, "eos_ids": EOS}
    whole = tiny.alone([3, 4], max_tokens=400, **options)
    assert whole.reason is FinishReason.EOS
    assert set(json.loads(whole.text)) == {"a", "b"}

    length = whole.finished.usage.completion_tokens
    for max_tokens in range(1, length):
        cut = tiny.alone([3, 4], max_tokens=max_tokens, **options)
        assert whole.text.startswith(cut.text)
        assert cut.reason is FinishReason.LENGTH or cut.text == whole.text
        if cut.text != whole.text:
            with pytest.raises(json.JSONDecodeError):
                json.loads(cut.text)


def test_rows_with_and_without_constraints_share_steps(
    tiny: TinyEngine, constraint: Constraint
) -> None:
    """Each row draws what it draws alone: a mask concerns its own row."""
    options_of_rows: list[dict[str, Any]] = [
        {"sampling": sampling(n), "constraint": constraint if n % 2 else None, "max_tokens": 40}
        for n in range(4)
    ]
    alone = [tiny.alone([5, 6], eos_ids=EOS, **options).ids for options in options_of_rows]
    together = [tiny.submit([5, 6], eos_ids=EOS, **options)[1] for options in options_of_rows]
    tiny.run()

    assert [sink.ids for sink in together] == alone


def test_a_stop_string_ends_a_constrained_stream(tiny: TinyEngine, constraint: Constraint) -> None:
    """Stop strings go on to work; what they cut is told as theirs."""
    sink = tiny.alone(
        [3, 4],
        sampling=sampling(1),
        constraint=constraint,
        eos_ids=EOS,
        max_tokens=400,
        stop=('"b"',),
    )

    assert sink.reason is FinishReason.STOP_STRING
    assert '"a"' in sink.text
    assert '"b"' not in sink.text
