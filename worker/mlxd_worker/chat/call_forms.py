"""How a template wants an assistant's calls: decided once a template, by probe conversations.

Templates differ in two things that the wire does not say. Arguments are an object to some, JSON
text to others. And a message that has calls and no content lacks the key, or has an empty text, or
None: one template sums up texts and fails on None, the next looks whether the key is there, a third
writes `null` into the prompt where a text is missing.

Invariants:
- A form is kept only if it renders, and writes nothing for the content that is missing.
- Of several that do, the one that shows the calls in most probes is kept; of these the first, in
  the order of `_FORMS`: objects before text, no key before an empty text before None.
"""

from __future__ import annotations

import enum
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from mlxd_worker.chat.environment import render, to_json

Message = dict[str, Any]


class Missing(enum.Enum):
    """What a message that has calls and no content is given for it."""

    NO_KEY = "no key"
    EMPTY = "an empty text"
    NONE = "None"


@dataclass(frozen=True, slots=True)
class CallForm:
    """How calls are given to a template."""

    arguments_as_text: bool = False
    """Their arguments as JSON text rather than an object."""
    missing: Missing = Missing.NO_KEY


@dataclass(frozen=True, slots=True)
class CallForms:
    """The forms of one template."""

    beside_content: CallForm = CallForm()
    """Of a message that has content, too."""
    alone: CallForm | None = CallForm()
    """Of one that has none; None where the template takes calls beside content only."""


def form_message(message: Message, forms: CallForms) -> Message:
    """Return a message in the form that its template wants; its content is None where it has none.

    Calls that no form suits are given in the first one, and it is the template that says so.
    """
    if "tool_calls" not in message:
        return message
    if message["content"] is not None:
        return _in_form(message, forms.beside_content)
    return _in_form(message, forms.alone or CallForm())


@functools.lru_cache(maxsize=8)
def call_forms(template: str, special: tuple[tuple[str, str], ...] = ()) -> CallForms:
    """Return how a template wants calls; asks it for a few dozen short texts at most.

    special: the special tokens that it knows by name.
    """
    probe = _Probe(template, dict(special))
    beside = _best(
        [form for form in _FORMS if form.missing is Missing.NO_KEY], probe.beside_content
    )
    alone = _best(_FORMS, probe.alone)
    if alone is None and beside is None:
        return CallForms()  # it refuses such conversations; its error for one is the answer
    return CallForms(beside or CallForm(), alone)


_FORMS: Final = tuple(
    CallForm(arguments_as_text, missing)
    for arguments_as_text in (False, True)
    for missing in Missing
)
_FAILS, _WITHOUT_CALLS, _WITH_CALLS = range(3)
_Grades = Sequence[int] | None
"""What became of each probe; None: something was written for the content that is missing."""


def _best(forms: Sequence[CallForm], grades_of: Callable[[CallForm], _Grades]) -> CallForm | None:
    """Return the form that shows calls in most probes, the first of several; None: none fits."""
    best, best_sum = None, 0
    for form in forms:
        grades = grades_of(form)
        if grades is None or sum(grades) <= best_sum:
            continue
        if set(grades) == {_WITH_CALLS}:
            return form
        best, best_sum = form, sum(grades)
    return best


class _Probe:
    """One template, and what it made of the probe conversations."""

    def __init__(self, template: str, special: Mapping[str, str]) -> None:
        self._template = template
        self._special = special
        self._texts: dict[tuple[int, CallForm, str | None], str | None] = {}

    def beside_content(self, form: CallForm) -> _Grades:
        """Return the grades of messages with content."""
        return [_grade(self._text(number, form, _CONTENT)) for number in range(len(_PROBES))]

    def alone(self, form: CallForm) -> _Grades:
        """Return the grades of messages without."""
        grades = []
        for number in range(len(_PROBES)):
            text = self._text(number, form, None)
            if text is not None and _nothings(text) > self._fewest_nothings(number, form):
                return None
            grades.append(_grade(text))
        return grades

    def _fewest_nothings(self, number: int, form: CallForm) -> int:
        """Return how many spellings of nothing the template writes by itself in this probe."""
        others = [
            self._text(number, form, _CONTENT),
            *(
                self._text(number, CallForm(form.arguments_as_text, missing), None)
                for missing in (Missing.NO_KEY, Missing.EMPTY)
            ),
        ]
        return min((_nothings(text) for text in others if text is not None), default=0)

    def _text(self, number: int, form: CallForm, content: str | None) -> str | None:
        """Return what becomes of a probe; None where the template fails on it."""
        key = (number, form, content)
        if key not in self._texts:
            messages, more = _PROBES[number]
            variables = {
                "documents": None,
                "tools": None,
                **self._special,
                **more,
                "messages": [
                    _in_form({**message, "content": content}, form)
                    if "tool_calls" in message
                    else message
                    for message in messages
                ],
            }
            try:
                text = render(self._template, variables, now_s=0.0, chars_max=_PROBE_CHARS_MAX)
            except Exception:  # noqa: BLE001 - whatever it runs into, it is not the form
                text = None
            self._texts[key] = text
        return self._texts[key]


_NOTHING: Final = re.compile("none|null|undefined", re.IGNORECASE)
_PROBE_CHARS_MAX: Final = 1 << 20
_CONTENT: Final = "probecontent"


def _nothings(text: str) -> int:
    """Return how often a text spells out that something is not there."""
    return len(_NOTHING.findall(text))


def _grade(text: str | None) -> int:
    """Return how good a probe's text is; arguments as Python or as JSON in JSON are not shown."""
    if text is None:
        return _FAILS
    garbled = "{'probekey'" in text or '\\"probekey' in text
    return _WITH_CALLS if "probekey" in text and not garbled else _WITHOUT_CALLS


def _in_form(message: Message, form: CallForm) -> Message:
    calls = message["tool_calls"]
    if form.arguments_as_text:
        calls = [_with_text(call) for call in calls]
    message = {**message, "tool_calls": calls}
    if message["content"] is None:
        match form.missing:
            case Missing.NO_KEY:
                del message["content"]
            case Missing.EMPTY:
                message["content"] = ""
            case Missing.NONE:
                pass
    return message


def _with_text(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    return {**call, "function": {**function, "arguments": to_json(function["arguments"])}}


_USER: Final[Message] = {"role": "user", "content": "a"}
_CALL: Final[Message] = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {
            "type": "function",
            "id": "abc123def",
            "function": {"name": "f", "arguments": {"probekey": "b"}},
        }
    ],
}
_ANSWER: Final[Message] = {"role": "tool", "content": "c", "tool_call_id": "abc123def", "name": "f"}
_THOUGHT: Final[Message] = {**_CALL, "reasoning_content": "d", "thinking": "d"}
_TOOLS: Final = [
    {
        "type": "function",
        "function": {
            "name": "f",
            "description": "d",
            "parameters": {"type": "object", "properties": {}, "required": []},
        },
    }
]
_BEGUN: Final = {"tools": _TOOLS, "add_generation_prompt": True}
_PROBES: Final[tuple[tuple[list[Message], dict[str, Any]], ...]] = (
    ([_USER, _CALL, _ANSWER], _BEGUN),
    ([_USER, _THOUGHT, _ANSWER], _BEGUN),
    ([_USER, _CALL, _ANSWER, {"role": "assistant", "content": "e"}, _USER], _BEGUN),
    ([_USER, _CALL], {"add_generation_prompt": False}),
)
"""A call that was answered, thought over or not, one that is long ago, and one that is last."""
