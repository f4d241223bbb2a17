"""From what a conversation asks of its answer's calls to a grammar.

Invariants:
- A grammar of required calls holds all of the answer: reasoning, where the model has it, then
  calls. Any other one holds what follows an opening mark.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from mlxd_shared.domain.errors import InvalidRequest
from mlxd_worker.chat.parsing import harmony
from mlxd_worker.chat.parsing.pieces import Begin
from mlxd_worker.chat.parsing.registry import OutputFormat
from mlxd_worker.constraints.calls.dialects import Dialect, Wish, dialect_of
from mlxd_worker.constraints.calls.lark import Rules
from mlxd_worker.constraints.calls.offers import read_offers
from mlxd_worker.engine.masks.calls import Marks
from mlxd_worker.engine.masks.limits import CALLS_START, HEADER

FIELD: Final = "chat.tool_choice"


@dataclass(frozen=True, slots=True)
class CallFormat:
    """What a grammar of calls depends on, beside the model's tokens."""

    output: OutputFormat
    tools_json: tuple[str, ...]
    required: bool = False
    """Whether the answer is calls, from its first token on."""
    name: str = ""
    """The only tool that may be called; empty: any."""
    several: bool = True
    """Whether there may be more calls than one."""
    reasoning: bool = False
    """Whether the prompt has begun reasoning, where calls are required."""

    @property
    def is_writable(self) -> bool:
        """Whether the model has a form for calls."""
        return dialect_of(self.output.family) is not None


def write_calls(wanted: CallFormat, tokens: Mapping[str, int]) -> str:
    """Return the grammar. tokens: the ids of the spellings that are control tokens.

    Raises:
        InvalidRequest: a tool whose calls cannot be held; names its field. Or there is none, or no
            form for calls.
    """
    dialect = dialect_of(wanted.output.family)
    if dialect is None:
        raise InvalidRequest.of(FIELD, "the model's chat template has no form for calls")
    offers = read_offers(wanted.tools_json, name=wanted.name)
    if not offers:
        raise InvalidRequest.of(FIELD, "no function is on offer")
    rules = Rules(tokens)
    body = dialect.body(rules, Wish(offers, wanted.several))
    start = _write_required(wanted, dialect, rules, body) if wanted.required else body
    return HEADER + CALLS_START + rules.write(start)


def marks_of(output: OutputFormat, begin: Begin) -> Marks:
    """Return what tells that a call begins, in an answer that begins like this."""
    dialect = dialect_of(output.family)
    assert dialect is not None, "asked where calls have a form"
    think = output.think
    return Marks(
        dialect.opening.encode(),
        b"" if think is None else think.open.encode(),
        b"" if think is None else think.close.encode(),
        reasoning=begin.reasoning,
        middle=begin.middle,
    )


def _write_required(wanted: CallFormat, dialect: Dialect, rules: Rules, body: str) -> str:
    opening = rules.text(dialect.opening)
    call = f"{opening if dialect.needs_opening else f'({opening})?'} {body}"
    if wanted.several and dialect.repeats:
        item = rules.rule(call)
        call = f"{item} ({rules.blanks} {item})*"
    return f"{_write_thought(wanted, rules)} {call}"


def _write_thought(wanted: CallFormat, rules: Rules) -> str:
    """Return what may come before the first call: reasoning, and blanks."""
    output, blanks = wanted.output, rules.blanks
    if output.family.make is harmony.HarmonyParser:
        opened = rules.text(f"{harmony.CHANNEL}analysis{harmony.MESSAGE}")
        again = rules.text(f"{harmony.START}assistant")
        return f"({opened} {rules.up_to(harmony.ENDS[0])} {again})?"
    if output.think is None:
        return blanks
    thought = rules.up_to(output.think.close)
    if wanted.reasoning:
        return f"{thought} {blanks}"
    return f"{blanks} ({rules.text(output.think.open)} {thought} {blanks})?"
