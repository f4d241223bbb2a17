"""How errors of agents travel: the same error comes out."""

from __future__ import annotations

import pickle

import pytest

from mlxd_controller.fleet.errors import EpochPassed, Failed, NodeLost, close_answer, open_answer
from mlxd_shared.domain.errors import InvalidRequest, MlxdError, WorkerExited, WorkerTimedOut

ERRORS: list[MlxdError] = [
    WorkerExited("m", ("one", "two"), 3),
    WorkerTimedOut("m", ("x",), 2.0, "late"),
    InvalidRequest.of("field", "limit"),
]


@pytest.mark.parametrize("error", ERRORS)
def test_an_error_keeps_its_class_and_fields(error: MlxdError) -> None:
    """Through what cannot carry exceptions."""
    crossed = pickle.loads(pickle.dumps(close_answer(error)))
    with pytest.raises(type(error)) as caught:
        open_answer(crossed)
    assert vars(caught.value) == vars(error)


def test_a_later_controller_is_named() -> None:
    """With the epoch that the agent follows."""
    with pytest.raises(EpochPassed) as caught:
        open_answer(close_answer(EpochPassed("a", 7)))
    assert (caught.value.node, caught.value.held) == ("a", 7)


@pytest.mark.parametrize(
    "answer",
    [
        Failed("OfAnotherVersion", (("field", 1),)),
        Failed("WorkerExited", (("model", "m"),)),
        Failed("WorkerExited", (("model", "m"), ("last_lines", ()), ("code", 3), ("more", 1))),
    ],
)
def test_an_error_of_another_version_is_the_loss_of_the_node(answer: Failed) -> None:
    """Whoever asked expects that, and no bug of a table."""
    with pytest.raises(NodeLost, match=f"another version of mlxd: {answer.kind}"):
        open_answer(answer)


def test_an_answer_is_itself() -> None:
    """Whatever it is."""
    assert open_answer((1, "x")) == (1, "x")
    assert open_answer(None) is None
