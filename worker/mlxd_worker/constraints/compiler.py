"""Compile response formats for one model's vocabulary, and keep the last ones.

Invariants:
- Any thread; two compilations may run at once, never two for the same format that began together.
- Nothing here can be interrupted: our work is bounded by the sizes that each reader names, the
  library's by `limits_of`, and by a trial in a process that can be killed.
- What is wrong with a format is told by its field on the wire, and the place in it.
"""

from __future__ import annotations

import re
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

from llguidance import LLParserLimits

from mlxd_shared import config
from mlxd_shared.domain.errors import InvalidRequest, ShuttingDown
from mlxd_shared.domain.formats import FormatKind, ResponseFormat
from mlxd_worker.constraints.calls.grammar import FIELD, CallFormat, write_calls
from mlxd_worker.constraints.calls.lark import json_schema
from mlxd_worker.constraints.gbnf import GrammarError, to_lark
from mlxd_worker.constraints.patterns import PatternError, literal_pattern, whole_pattern
from mlxd_worker.constraints.schema_keywords import read_schema
from mlxd_worker.constraints.schema_places import SchemaError
from mlxd_worker.constraints.vocabulary import (
    Spellings,
    Vocabulary,
    call_vocabulary,
    spellings_of,
    token_bytes,
)
from mlxd_worker.engine.masks.advance import Grammar
from mlxd_worker.engine.masks.calls import CallConstraint, Marks
from mlxd_worker.engine.masks.constraint import Constraint
from mlxd_worker.engine.masks.limits import HEADER, REASON_CHARS_MAX, limits_of, reason
from mlxd_worker.killable.pool import Pool
from mlxd_worker.killable.questions import Closed, Died, Late
from mlxd_worker.text.spelling import UnknownDecoder
from mlxd_worker.text.tokenizer import Tokenizer

TRIAL: Final = (sys.executable, "-m", "mlxd_worker.constraints.trial")
"""What starts a child that tries grammars out."""

Wanted = ResponseFormat | CallFormat
NO_CONTROLS: Final[Mapping[str, int]] = MappingProxyType({})
SMALL_CHARS: Final = 4_000
"""Of a source that is not tried out before, where it is of a kind whose cost grows with its size:
that takes the library a few milliseconds, and a trial as many again."""
_MULTIPLIES: Final = re.compile(
    r'"(?:\$ref|allOf|anyOf|pattern|patternProperties|multipleOf)":|[0-9]{4}'
)
"""What may cost more than its size: parts that meet each other, expressions, large numbers."""


class Constraints:
    """The compiled formats of one model. Any thread."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        vocab_size: int,
        controls: Mapping[str, int] = NO_CONTROLS,
        *,
        limits: Callable[[str], LLParserLimits] = limits_of,
    ) -> None:
        """Tell the library of the vocabulary, which holds the interpreter for up to a second.

        controls: the ids of the spellings that steer a chat.
        limits: what the library may spend on a constraint in its notation; not on one of calls.
        """
        self._lock = threading.Lock()
        self._kept: OrderedDict[Wanted, Constraint] = OrderedDict()
        self._vocabulary: Vocabulary | None = None
        self._call_vocabulary: Vocabulary | None = None
        self._spellings: Spellings | None = None
        self._calling = threading.Lock()
        self._controls = {text: i for text, i in controls.items() if i < vocab_size}
        self._problem = ""
        try:
            self._tokens = token_bytes(tokenizer, vocab_size)
            self._vocabulary = Vocabulary(self._tokens, limits)
        except UnknownDecoder as error:
            self._problem = f"not with this model: {error}"

    @property
    def are_served(self) -> bool:
        """Whether the tokenizer says what a token adds to a text."""
        return self._vocabulary is not None

    def find_kept(self, wanted: Wanted) -> Constraint | None:
        """Return a format that is compiled already; none that its rows have filled up."""
        with self._lock:
            constraint = self._kept.get(wanted)
            if constraint is None:
                return None
            if constraint.turns.full:
                del self._kept[wanted]
                return None
            self._kept.move_to_end(wanted)
            return constraint

    def rest(self) -> None:
        """Keep no format any more; rows that have one keep theirs.

        What a format's rows have met stays with it: up to 30 MB, which no account has.
        """
        with self._lock:
            self._kept.clear()

    def compile(self, wanted: Wanted, trials: Pool | None = None) -> Constraint:
        """Compile a format and keep it; takes milliseconds, or seconds for a monstrous one.

        trials: of `TRIAL`, which try a grammar out before; None where who asks can be trusted.

        Raises:
            InvalidRequest: it makes no sense, is not served, or takes more than its bounds allow.
        """
        field, calls = field_of(wanted), isinstance(wanted, CallFormat)
        if self._vocabulary is None:
            raise InvalidRequest.of(field if calls else "response_format", self._problem)
        source = _source_of(wanted)  # where tokens are named by ids, with their spellings
        if trials is not None and not _is_small(source, wanted):
            try_out(trials, source, field)
        vocabulary = self._vocabulary
        if isinstance(wanted, CallFormat):
            source = write_calls(wanted, self._controls)
            vocabulary = self._for_calls(vocabulary)
        constraint = vocabulary.compile(source, field, names_tokens=calls)
        with self._lock:
            self._kept[wanted] = constraint
            while len(self._kept) > config.CONSTRAINTS_KEPT_MAX or (
                sum(map(_chars, self._kept)) > config.CONSTRAINTS_KEPT_CHARS_MAX
                and len(self._kept) > 1
            ):
                self._kept.popitem(last=False)
        return constraint

    def watch(self, grammar: Grammar, marks: Marks, *, ends: bool) -> CallConstraint:
        """Return a compiled grammar of calls as one that sleeps until a call begins.

        ends: whether the answer ends with its first call.
        """
        assert self._vocabulary is not None, "nothing is compiled without"
        known = self.learn_spellings()
        return CallConstraint(grammar, marks, known.pieces, known.ids, ends=ends)

    def learn_spellings(self) -> Spellings:
        """Return how calls are noticed; the first time takes some 50 ms of a large vocabulary.

        To be called only where formats are served.
        """
        with self._calling:
            if self._spellings is None:
                self._spellings = spellings_of(self._tokens, self._controls)
            return self._spellings

    def _for_calls(self, plain: Vocabulary) -> Vocabulary:
        self.learn_spellings()  # whoever compiles can wait for them
        with self._calling:
            if self._call_vocabulary is None:
                self._call_vocabulary = call_vocabulary(self._tokens, plain, self._controls)
            return self._call_vocabulary


def _is_small(source: str, wanted: Wanted) -> bool:
    """Tell whether a grammar cannot take the library long: short, and nothing in it multiplies."""
    kind = FormatKind.JSON_SCHEMA if isinstance(wanted, CallFormat) else wanted.kind
    if kind is FormatKind.JSON_SCHEMA:
        return len(source) <= SMALL_CHARS and not _MULTIPLIES.search(source)
    return kind is FormatKind.JSON_OBJECT or (
        kind is FormatKind.CHOICE and len(source) <= SMALL_CHARS
    )


def try_out(
    trials: Pool, source: str, field: str, *, limit_s: float = config.CONSTRAINT_COMPILE_S
) -> None:
    """Compile a grammar, called `field` on the wire, where it can do no harm.

    Raises:
        InvalidRequest: the library refuses it, it takes longer than `limit_s`, or too much memory.
        ShuttingDown: the children were ended.
    """
    try:
        problem = trials.ask(source.encode(), limit_s=limit_s).decode()
    except Late:
        problem = f"not compiled within {limit_s:g} s"
    except Died:
        problem = "takes more memory, or a deeper stack, than there is for it"
    except Closed:
        raise ShuttingDown from None
    if problem:
        raise InvalidRequest.of(field, reason(problem))


def field_of(wanted: Wanted) -> str:
    """Return what a format is called on the wire."""
    if isinstance(wanted, CallFormat):
        return FIELD if wanted.required else "chat.tools_json"
    return f"response_format.{wanted.kind.value}"


def _source_of(wanted: Wanted) -> str:
    """Return a format in the library's notation; raises InvalidRequest, with the place."""
    if isinstance(wanted, CallFormat):
        return write_calls(wanted, NO_CONTROLS)
    try:
        return HEADER + _SOURCES[wanted.kind](wanted)
    except (SchemaError, GrammarError, PatternError) as error:
        raise InvalidRequest.of(field_of(wanted), str(error)[:REASON_CHARS_MAX]) from None
    except RecursionError:
        raise InvalidRequest.of(field_of(wanted), "nested too deep") from None


def _json_source(schema: dict[str, Any]) -> str:
    return f"start: {json_schema(schema)}\n"


def _pattern_source(pattern: str) -> str:
    return f"start: TEXT\nTEXT: /{pattern}/\n"


_SOURCES: Final[dict[FormatKind, Callable[[ResponseFormat], str]]] = {
    FormatKind.JSON_SCHEMA: lambda wanted: _json_source(read_schema(wanted.text)),
    FormatKind.JSON_OBJECT: lambda _: _json_source({"type": "object"}),
    FormatKind.REGEX: lambda wanted: _pattern_source(whole_pattern(wanted.text)),
    FormatKind.EBNF_GRAMMAR: lambda wanted: to_lark(wanted.text),
    FormatKind.CHOICE: lambda wanted: _pattern_source(literal_pattern(wanted.choices)),
}


def _chars(wanted: Wanted) -> int:
    if isinstance(wanted, CallFormat):
        return sum(map(len, wanted.tools_json))
    return len(wanted.text) + sum(map(len, wanted.choices))
