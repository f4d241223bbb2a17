"""Compile response formats for one model's vocabulary, and keep the last ones.

Invariants:
- Any thread; two compilations may run at once, never two for the same format that began together.
- Nothing here can be interrupted: our work is bounded by the sizes that each reader names, the
  library's by `limits_of`, and by a trial in a process that can be killed.
- What is wrong with a format is told by its field on the wire, and the place in it.
"""

from __future__ import annotations

import json
import re
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from mlxd_shared import config
from mlxd_shared.domain.errors import InvalidRequest, ShuttingDown
from mlxd_shared.domain.formats import FormatKind, ResponseFormat
from mlxd_worker.constraints.gbnf import GrammarError, to_lark
from mlxd_worker.constraints.patterns import PatternError, literal_pattern, whole_pattern
from mlxd_worker.constraints.schema_keywords import read_schema
from mlxd_worker.constraints.schema_places import SchemaError
from mlxd_worker.engine.masks.constraint import Constraint
from mlxd_worker.engine.masks.limits import (
    HEADER,
    JSON_START,
    REASON_CHARS_MAX,
    limits_of,
    reason,
)
from mlxd_worker.killable.pool import Pool
from mlxd_worker.killable.questions import Closed, Died, Late
from mlxd_worker.text.spelling import UnknownDecoder
from mlxd_worker.text.tokenizer import Tokenizer

TRIAL: Final = (sys.executable, "-m", "mlxd_worker.constraints.trial")
"""What starts a child that tries grammars out."""

BLANKS: Final = r"[\x20\x09]{1,4}|\x0D?\x0A[\x20\x09]{0,32}"
"""What may be between two parts of JSON: blanks on a line, or a line's end and an indentation.
Without bounds some models write nothing else."""
ESCAPES: Final = 'nrbtf"\\'
r"""What may be behind a backslash: with `\u` a listed member could be spelled as another one."""
WORD_NBYTES: Final = 4
SMALL_CHARS: Final = 4_000
"""Of a source that is not tried out before, where it is of a kind whose cost grows with its size:
that takes the library a few milliseconds, and a trial as many again."""
_MULTIPLIES: Final = re.compile(
    r'"(?:\$ref|allOf|anyOf|pattern|patternProperties|multipleOf)":|[0-9]{4}'
)
"""What may cost more than its size: parts that meet each other, expressions, large numbers."""


class Constraints:
    """The compiled formats of one model. Any thread."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        """Tell the library of the vocabulary, which holds the interpreter for up to a second."""
        self._lock = threading.Lock()
        self._kept: OrderedDict[ResponseFormat, Constraint] = OrderedDict()
        self._kept_chars = 0
        self._vocabulary: _Vocabulary | None = None
        self._problem = ""
        try:
            self._vocabulary = _Vocabulary(token_bytes(tokenizer, vocab_size))
        except UnknownDecoder as error:
            self._problem = f"not with this model: {error}"

    def find_kept(self, wanted: ResponseFormat) -> Constraint | None:
        """Return a format that is compiled already."""
        with self._lock:
            constraint = self._kept.get(wanted)
            if constraint is not None:
                self._kept.move_to_end(wanted)
            return constraint

    def compile(self, wanted: ResponseFormat, trials: Pool | None = None) -> Constraint:
        """Compile a format and keep it; takes milliseconds, or seconds for a monstrous one.

        trials: of `TRIAL`, which try a grammar out before; None where who asks can be trusted.

        Raises:
            InvalidRequest: it makes no sense, is not served, or takes more than its bounds allow.
        """
        if self._vocabulary is None:
            raise InvalidRequest.of("response_format", self._problem)
        source = _source_of(wanted)
        if trials is not None and not _is_small(source, wanted.kind):
            try_out(trials, source, wanted.kind)
        constraint = self._vocabulary.compile(source, wanted.kind)
        with self._lock:
            if wanted not in self._kept:
                self._kept_chars += _chars(wanted)
            self._kept[wanted] = constraint
            while len(self._kept) > config.CONSTRAINTS_KEPT_MAX or (
                self._kept_chars > config.CONSTRAINTS_KEPT_CHARS_MAX and len(self._kept) > 1
            ):
                old, _ = self._kept.popitem(last=False)
                self._kept_chars -= _chars(old)
        return constraint


@dataclass(frozen=True, slots=True)
class TokenBytes:
    """What the tokens of a vocabulary add to a text, wherever they stand. Immutable, any thread."""

    pieces: tuple[bytes, ...]
    """The bytes of each id; empty for an id that adds no text, as a special one, or that is none.

    Those are never drawn under a constraint, but for those that end the text.
    """
    eos_ids: tuple[int, ...]
    """The ids that end a text."""


def token_bytes(tokenizer: Tokenizer, vocab_size: int) -> TokenBytes:
    """Return the bytes of the ids below `vocab_size`, as `detokenizer(anchored=True)` gives them.

    Raises:
        UnknownDecoder: the tokenizer's decoder does not say what a single token adds.
    """
    eos_ids = tuple(i for i in tokenizer.eos_ids if i < vocab_size)
    pieces = tokenizer.pieces()
    return TokenBytes(
        tuple(b"" if i in eos_ids else pieces.get(i, b"") for i in range(vocab_size)), eos_ids
    )


class _Vocabulary:
    """A vocabulary as the library knows it."""

    def __init__(self, tokens: TokenBytes) -> None:
        size = len(tokens.pieces)
        words = -(-size // 32)
        eos_ids = list(tokens.eos_ids)
        if not eos_ids:  # the library wants one: an id beyond those that the model has
            eos_ids, size = [size], size + 1
        self._mask_nbytes = words * WORD_NBYTES
        self._tokenizer = LLTokenizer(
            TokenizerWrapper(_Adapter(tokens, size, eos_ids[0])), eos_token=eos_ids
        )

    def compile(self, source: str, kind: FormatKind) -> Constraint:
        """Return the constraint of a grammar in the library's notation."""
        matcher = LLMatcher(self._tokenizer, source, log_level=0, limits=limits_of(source))
        first_mask = b"" if matcher.is_error() else matcher.compute_bitmask()
        if matcher.is_error():
            raise InvalidRequest.of(field_of(kind), reason(matcher.get_error()))
        return Constraint(matcher, first_mask[: self._mask_nbytes], field_of(kind))


class _Adapter:
    """What the library asks a tokenizer for."""

    def __init__(self, tokens: TokenBytes, size: int, eos_id: int) -> None:
        self.tokens = [*tokens.pieces, *[b""] * (size - len(tokens.pieces))]
        self.special_token_ids = sorted({*tokens.eos_ids, eos_id})
        self.eos_token_id = eos_id
        self.bos_token_id: int | None = None

    def __call__(self, text: bytes) -> list[int]:
        """Refuse: nothing is forced, so nothing is ever tokenised."""
        raise AssertionError(f"nothing is forced, and {len(text)} bytes were to be tokenised")


def _is_small(source: str, kind: FormatKind) -> bool:
    """Tell whether a grammar cannot take the library long: short, and nothing in it multiplies."""
    if kind is FormatKind.JSON_SCHEMA:
        return len(source) <= SMALL_CHARS and not _MULTIPLIES.search(source)
    return kind is FormatKind.JSON_OBJECT or (
        kind is FormatKind.CHOICE and len(source) <= SMALL_CHARS
    )


def try_out(
    trials: Pool, source: str, kind: FormatKind, *, limit_s: float = config.CONSTRAINT_COMPILE_S
) -> None:
    """Compile a grammar where it can do no harm.

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
        raise InvalidRequest.of(field_of(kind), reason(problem))


def field_of(kind: FormatKind) -> str:
    """Return what a format is called on the wire."""
    return f"response_format.{kind.value}"


def _source_of(wanted: ResponseFormat) -> str:
    """Return a format in the library's notation; raises InvalidRequest, with the place."""
    try:
        return HEADER + _SOURCES[wanted.kind](wanted)
    except (SchemaError, GrammarError, PatternError) as error:
        raise InvalidRequest.of(field_of(wanted.kind), str(error)[:REASON_CHARS_MAX]) from None
    except RecursionError:
        raise InvalidRequest.of(field_of(wanted.kind), "nested too deep") from None


def _json_source(schema: dict[str, Any]) -> str:
    options = {"whitespace_pattern": BLANKS, "json_allowed_escapes": ESCAPES}
    return f"{JSON_START}{json.dumps({**schema, 'x-guidance': options}, ensure_ascii=False)}\n"


def _pattern_source(pattern: str) -> str:
    return f"start: TEXT\nTEXT: /{pattern}/\n"


_SOURCES: Final[dict[FormatKind, Callable[[ResponseFormat], str]]] = {
    FormatKind.JSON_SCHEMA: lambda wanted: _json_source(read_schema(wanted.text)),
    FormatKind.JSON_OBJECT: lambda _: _json_source({"type": "object"}),
    FormatKind.REGEX: lambda wanted: _pattern_source(whole_pattern(wanted.text)),
    FormatKind.EBNF_GRAMMAR: lambda wanted: to_lark(wanted.text),
    FormatKind.CHOICE: lambda wanted: _pattern_source(literal_pattern(wanted.choices)),
}


def _chars(wanted: ResponseFormat) -> int:
    return len(wanted.text) + sum(map(len, wanted.choices))
