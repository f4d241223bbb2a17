"""min_tokens: nothing ends a stream before, and from then on everything does as ever.

The model answers each token with the next higher one; where that is forbidden, with token 0.
"""

from __future__ import annotations

from typing import Any

import pytest

from mlxd_shared.domain.errors import InvalidRequest
from mlxd_shared.domain.requests import FinishReason
from mlxd_worker.engine.request import Failed
from tests.support.engines import Collected, TinyEngine
from tests.worker.engine.test_cases import EOS, VOCAB, chain_engine


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyEngine:
    """An engine on the chain."""
    return chain_engine(tmp_path_factory.mktemp("chain"))


@pytest.mark.parametrize(
    ("limits", "ids", "text", "reason"),
    [
        ({"eos": True, "min_tokens": 3}, [2, 3, 4], "234", FinishReason.EOS),
        ({"eos": True, "min_tokens": 4}, [2, 3, 4, 0, 1, 2, 3, 4], "23401234", FinishReason.EOS),
        ({"stop_ids": {3}, "min_tokens": 1}, [2], "2", FinishReason.STOP_TOKEN),
        ({"stop_ids": {3}, "min_tokens": 2}, [2, 0, 1, 2], "2012", FinishReason.STOP_TOKEN),
        ({"stop": ("3",), "min_tokens": 2}, [2, 3], "2", FinishReason.STOP_STRING),
        ({"stop": ("3",), "min_tokens": 3, "max_tokens": 5}, [2, 3, 4, 5, 6], "23456",
         FinishReason.LENGTH),
        ({"stop": ("34",), "min_tokens": 3}, [2, 3, 4], "2", FinishReason.STOP_STRING),
        ({"stop": ("3", "345"), "min_tokens": 3}, [2, 3, 4, 5], "2", FinishReason.STOP_STRING),
        ({"eos": True, "min_tokens": 4, "max_tokens": 4}, [2, 3, 4, 0], "2340",
         FinishReason.LENGTH),
    ],
)  # fmt: skip
def test_no_end_before_so_many_tokens(
    tiny: TinyEngine, limits: dict[str, Any], ids: list[int], text: str, reason: FinishReason
) -> None:
    """By hand: another token is drawn for an end, and a stop string that ends too early is text."""
    options = {
        "eos_ids": frozenset({EOS}) if limits.get("eos") else frozenset(),
        "stop_token_ids": frozenset(limits.get("stop_ids", ())),
        "stop": limits.get("stop", ()),
        "min_tokens": limits["min_tokens"],
        "max_tokens": limits.get("max_tokens", 50),
    }
    sink = tiny.alone([1], **options)

    assert (sink.ids, sink.text, sink.reason) == (ids, text, reason)
    assert sink.finished.usage.completion_tokens == len(ids)


def test_a_request_that_leaves_nothing_but_ends_fails_alone(tiny: TinyEngine) -> None:
    """It is told so in its own terms; the row beside it goes on as if alone."""
    every = frozenset(range(VOCAB))
    _, hopeless = tiny.submit([1], stop_token_ids=every, min_tokens=1)
    _, neighbour = tiny.submit([1], max_tokens=6)
    tiny.run()

    assert neighbour.ids == [2, 3, 4, 5, 6, 7]
    assert_refused(hopeless, "min_tokens")
    assert tiny.alone([1], max_tokens=2).ids == [2, 3]


def assert_refused(sink: Collected, field: str) -> None:
    """The stream's only event is an error about this field."""
    (event,) = sink.events
    assert isinstance(event, Failed)
    assert isinstance(event.error, InvalidRequest)
    assert [violation.field for violation in event.error.violations] == [field]
