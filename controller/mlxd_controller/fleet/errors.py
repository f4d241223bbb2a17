"""What may become of a call to a node, and how an agent's errors travel.

An agent answers with the error as plain values: exceptions do not survive every way of calling.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

from mlxd_shared.domain.errors import MlxdError


class NodeLost(Exception):
    """The node, or what runs for the controller there, cannot be reached, or is no longer ours."""


class EpochPassed(NodeLost):
    """The agent follows another controller: a later one, or none yet if `held` is 0."""

    def __init__(self, node: str, held: int) -> None:
        super().__init__(f"node {node} follows another controller (epoch {held})")
        self.node = node
        self.held = held


@dataclass(frozen=True, slots=True)
class Failed:
    """An answer that is an error: the name of its class, and its fields."""

    kind: str
    fields: tuple[tuple[str, Any], ...]


def close_answer(error: MlxdError | EpochPassed) -> Failed:
    """Return an error as it travels."""
    if isinstance(error, EpochPassed):
        return Failed(EpochPassed.__name__, (("node", error.node), ("held", error.held)))
    values = ((f.name, getattr(error, f.name)) for f in fields(error))  # type: ignore[arg-type]
    return Failed(type(error).__name__, tuple(values))


def open_answer(answer: Any) -> Any:  # noqa: ANN401 - of whatever method
    """Return what an agent answered.

    Raises:
        EpochPassed: it follows another controller.
        MlxdError: its own error.
        NodeLost: an error that this version does not know.
    """
    if not isinstance(answer, Failed):
        return answer
    values = dict(answer.fields)
    if answer.kind == EpochPassed.__name__:
        raise EpochPassed(**values)
    kind = {each.__name__: each for each in _all_of(MlxdError)}.get(answer.kind)
    known = () if kind is None else fields(kind)  # type: ignore[arg-type]
    if kind is None or {each.name for each in known} != values.keys():
        raise NodeLost(f"its answer is of another version of mlxd: {answer.kind} {values}")
    raise kind(**values)


def _all_of(kind: type[MlxdError]) -> Iterator[type[MlxdError]]:
    for derived in kind.__subclasses__():
        yield derived
        yield from _all_of(derived)
