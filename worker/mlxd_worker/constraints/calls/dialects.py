"""How each family writes calls, as rules: what follows an opening mark, up to the last one.

Invariants:
- What a dialect allows its parser reads (`chat.parsing`): a decoder's forms are all there, so that
  the model keeps to the one that it has learned.
- JSON is `{"name": ..., "arguments": ...}` in this order, as every template shows it.
"""

# ruff: noqa: RUF001 - letters of the models' own

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from mlxd_worker.chat.parsing import harmony, syntaxes
from mlxd_worker.chat.parsing.llama3 import PYTHON_TAG
from mlxd_worker.chat.parsing.registry import Family
from mlxd_worker.constraints.calls.lark import Rules, any_of
from mlxd_worker.constraints.calls.offers import Offer, refuse_names, write_members

OBJECT: Final[dict[str, Any]] = {"type": "object"}
Offers = Sequence[Offer]


@dataclass(frozen=True, slots=True)
class Wish:
    """What may be called, and whether more than once."""

    offers: Offers
    several: bool


@dataclass(frozen=True, slots=True)
class Dialect:
    """One way to write calls."""

    family: str
    opening: str
    """The mark that a call, or a section of calls, begins with."""
    body: Callable[[Rules, Wish], str]
    """What is between that mark and the next text."""
    repeats: bool = True
    """Whether more calls begin with a mark of their own."""
    needs_opening: bool = True
    """Whether a call cannot do without the mark."""


def _by_name(rules: Rules, offers: Offers, between: str, *, quoted: bool = False) -> str:
    """Return a tool's name, `between`, and its arguments as JSON."""
    free = [offer.name for offer in offers if offer.schema is None]
    ways = [
        f"{rules.text(_name(offer.name, quoted=quoted))} {between} {rules.json(offer.schema)}"
        for offer in offers
        if offer.schema is not None
    ]
    if free:
        names = any_of(rules.text(_name(name, quoted=quoted)) for name in free)
        ways.append(f"{names} {between} {rules.json(OBJECT)}")
    return any_of(ways)


def _name(name: str, *, quoted: bool) -> str:
    return json.dumps(name, ensure_ascii=False) if quoted else name


def _object(rules: Rules, offers: Offers, arguments: str = "arguments") -> str:
    """Return a call as one JSON object."""
    blanks = rules.blanks

    def key(name: str) -> str:
        return f'{blanks} {rules.text(json.dumps(name))} {blanks} ":" {blanks}'

    between = f'{blanks} "," {key(arguments)}'
    call = _by_name(rules, offers, between, quoted=True)
    return rules.rule(f'"{{" {key("name")} {call} {blanks} "}}"')


def _several(rules: Rules, one: str, separator: str, *, many: bool) -> str:
    """Return one, or as many as there may be."""
    item = rules.rule(one)
    return f"{item} ({separator} {item})*" if many else item


def _hermes(rules: Rules, wish: Wish) -> str:
    blanks = rules.blanks
    return f"{blanks} {_object(rules, wish.offers)} {blanks} {rules.text('</tool_call>')}"


def _coder(rules: Rules, wish: Wish) -> str:
    refuse_names(wish.offers)
    blanks, close = rules.blanks, "</tool_call>"
    calls = [
        f"{rules.text(f'<function={offer.name}>')} {blanks} "
        + write_members(
            rules,
            offer,
            begin=lambda name: rules.text(f"<parameter={name}>"),
            begin_any=f"{rules.text('<parameter=')} {_any_name(rules)} {rules.text('>')}",
            line=True,
            end="</parameter>",
            without=close,
        )
        for offer in wish.offers
    ]
    ended = f"{rules.text('</function>')} {blanks} {rules.text(close)}"
    return f"{blanks} {any_of(calls)} {ended}"


def _glm(rules: Rules, wish: Wish) -> str:
    refuse_names(wish.offers)
    blanks, close = rules.blanks, "</tool_call>"
    value = f"{rules.text('</arg_key>')} {blanks} {rules.text('<arg_value>')}"
    calls = [
        f"{rules.text(offer.name)} {blanks} "
        + write_members(
            rules,
            offer,
            begin=lambda name: f"{rules.text(f'<arg_key>{name}')} {value}",
            begin_any=f"{rules.text('<arg_key>')} {_any_name(rules)} {value}",
            line=False,
            end="</arg_value>",
            without=close,
        )
        for offer in wish.offers
    ]
    return f"{blanks} {any_of(calls)} {rules.text(close)}"


def _dsml(section: str) -> Callable[[Rules, Wish], str]:
    mark = syntaxes.DSML_MARK

    def body(rules: Rules, wish: Wish) -> str:
        refuse_names(wish.offers)
        blanks = rules.blanks
        opened, named = f'<{mark}parameter name="', '" string='
        calls = [
            f"{rules.text(_dsml_invoke(mark, offer.name))} {blanks} "
            + write_members(
                rules,
                offer,
                begin=lambda name: rules.text(f"{opened}{name}{named}"),
                begin_any=f"{rules.text(opened)} {_any_name(rules)} {rules.text(named)}",
                line=False,
                end=f"</{mark}parameter>",
                text_sign='"true">',
                json_sign='"false">',
            )
            + f" {rules.text(f'</{mark}invoke>')}"
            for offer in wish.offers
        ]
        each = _several(rules, any_of(calls), blanks, many=wish.several)
        return f"{blanks} {each} {blanks} {rules.text(f'</{mark}{section}>')}"

    return body


def _dsml_invoke(mark: str, name: str) -> str:
    return f'<{mark}invoke name="{name}">'


def _any_name(rules: Rules) -> str:
    return rules.rule(r"/[^\s<>\[\]{}\x22:=]{1,64}/")


def _mistral(rules: Rules, wish: Wish) -> str:
    refuse_names(wish.offers)
    blanks = rules.blanks
    call_id = f"({rules.text('[CALL_ID]')} {rules.rule('/[A-Za-z0-9]{9}/')})?"
    named = _by_name(rules, wish.offers, f"{call_id} ({rules.text('[ARGS]')})? {blanks}")
    item = _object(rules, wish.offers)
    listed = _several(rules, item, f'{blanks} "," {blanks}', many=wish.several)
    return any_of((f'{blanks} "[" {blanks} {listed} {blanks} "]"', f"{blanks} {named}"))


def _kimi(rules: Rules, wish: Wish) -> str:
    refuse_names(wish.offers)
    begin, end, arguments = syntaxes.KIMI_MARKS
    blanks = rules.blanks
    number = rules.rule("/[0-9]{1,3}/")
    between = f'":" {number} {blanks} {rules.text(arguments)} {blanks}'
    called = _by_name(rules, wish.offers, between)
    call = f'{rules.text(begin)} {blanks} "functions." {called} {blanks} {rules.text(end)}'
    each = _several(rules, call, blanks, many=wish.several)
    return f"{blanks} {each} {blanks} {rules.text('<|tool_calls_section_end|>')}"


def _deepseek(rules: Rules, wish: Wish) -> str:
    refuse_names(wish.offers)
    begin, end, separator = syntaxes.DEEPSEEK_MARKS
    blanks = rules.blanks
    fence, fence_end = rules.text("\n```json\n"), rules.text("\n```")
    fenced = f"{rules.text(f'function{separator}')} {_by_name(rules, wish.offers, fence)}"
    bare = _by_name(rules, wish.offers, rules.text(separator))
    ways = any_of((f"{fenced} {fence_end}", bare))
    call = f"{rules.text(begin)} {ways} {rules.text(end)}"
    each = _several(rules, call, blanks, many=wish.several)
    return f"{blanks} {each} {blanks} {rules.text('<｜tool▁calls▁end｜>')}"


def _harmony(rules: Rules, wish: Wish) -> str:
    refuse_names(wish.offers)
    kind = f"({rules.blanks} {rules.text('<|constrain|>')} {rules.text('json')})?"
    called = _by_name(rules, wish.offers, f"{kind} {rules.text(harmony.MESSAGE)}")
    return f"{rules.text('functions.')} {called}"


def _llama3(rules: Rules, wish: Wish) -> str:
    item = _object(rules, wish.offers, "parameters")
    return _several(rules, item, f'";" {rules.blanks}', many=wish.several)


_DIALECTS: Final = (
    Dialect("hermes", syntaxes.HERMES.open, _hermes),
    Dialect("qwen3_coder", syntaxes.QWEN3_CODER.open, _coder),
    Dialect("glm4", syntaxes.GLM4.open, _glm),
    Dialect("mistral", syntaxes.MISTRAL.open, _mistral),
    Dialect("kimi", syntaxes.KIMI.open, _kimi, repeats=False),
    Dialect("deepseek", syntaxes.DEEPSEEK.open, _deepseek, repeats=False),
    Dialect("deepseek_dsml", syntaxes.DSML_V3.open, _dsml("function_calls"), repeats=False),
    Dialect("deepseek_dsml", syntaxes.DSML_V4.open, _dsml("tool_calls"), repeats=False),
    Dialect("harmony", f"{harmony.CHANNEL}commentary to=", _harmony, repeats=False),
    Dialect("llama3", PYTHON_TAG, _llama3, repeats=False, needs_opening=False),
)


def dialect_of(family: Family) -> Dialect | None:
    """Return how a family writes calls; None where it writes none."""
    opening = None if family.syntax is None else family.syntax.open
    fits = (
        each for each in _DIALECTS if each.family == family.name and opening in (None, each.opening)
    )
    return next(fits, None)
