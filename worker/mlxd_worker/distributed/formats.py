"""A stream's constraint as ranks that follow have it: its masks are told, and calls noticed."""

from __future__ import annotations

from base64 import b64decode, b64encode
from typing import TYPE_CHECKING, Any

from mlxd_worker.engine.masks.advance import Grammar
from mlxd_worker.engine.masks.calls import CallConstraint, Marks
from mlxd_worker.engine.masks.remote import RemoteConstraint

if TYPE_CHECKING:
    from mlxd_worker.constraints.compiler import Constraints


def constraint_values(constraint: Grammar | CallConstraint | None) -> Any:  # noqa: ANN401 - JSON
    """Return what followers have to know of a constraint, as values of JSON."""
    if not isinstance(constraint, CallConstraint):
        return None if constraint is None else _grammar_values(constraint)
    marks = constraint.marks
    calls = {
        "opening": _text(marks.opening),
        "think": _text(marks.think),
        "think_end": _text(marks.think_end),
        "reasoning": marks.reasoning,
        "middle": marks.middle,
        "ends": constraint.ends,
    }
    return _grammar_values(constraint.grammar) | {"calls": calls}


def constraint_of(
    values: Any,  # noqa: ANN401 - JSON
    formats: Constraints | None,
) -> RemoteConstraint | CallConstraint | None:
    """Return the constraint of such values.

    formats: of the model that is here, by whose vocabulary calls are noticed; None: there is no
    model, and the stream fails, whatever it asks for.
    """
    if values is None or formats is None:
        return None
    grammar = RemoteConstraint(_bytes(values["first_mask"]), values["field"])
    calls = values.get("calls")
    if calls is None:
        return grammar
    marks = Marks(
        _bytes(calls["opening"]),
        _bytes(calls["think"]),
        _bytes(calls["think_end"]),
        reasoning=calls["reasoning"],
        middle=calls["middle"],
    )
    return formats.watch(grammar, marks, ends=calls["ends"])


def _grammar_values(grammar: Grammar) -> dict[str, Any]:
    return {"field": grammar.field, "first_mask": _text(grammar.first_mask)}


def _text(own: bytes) -> str:
    return b64encode(own).decode()


def _bytes(text: str) -> bytes:
    return b64decode(text)
