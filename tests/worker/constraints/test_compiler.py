"""Formats are compiled once, kept within bounds, and refused by their field."""

from __future__ import annotations

import contextlib
import json
import sys
import threading
from typing import Any

import pytest
from llguidance import LLParserLimits

from mlxd_shared import config
from mlxd_shared.domain.errors import InvalidRequest, ShuttingDown
from mlxd_shared.domain.formats import FormatKind, ResponseFormat
from mlxd_shared.wire.status import to_status
from mlxd_worker.constraints.compiler import TRIAL, Constraints, _source_of, try_out
from mlxd_worker.engine.masks.calls import Marks
from mlxd_worker.engine.masks.constraint import Constraint
from mlxd_worker.engine.masks.limits import reason
from mlxd_worker.killable.pool import Pool
from mlxd_worker.killable.questions import Stop
from mlxd_worker.text.tokenizer import Tokenizer
from tests.support.constrained import accepts, compile_format, demo_constraints, demo_tokenizer

HANGS = (
    sys.executable,
    "-c",
    "import sys, threading\nsys.stdin.buffer.readline()\nthreading.Event().wait()",
)
DEEP = "".join(f"r{i} ::= r{i + 1}\n" for i in range(1500)) + 'r1500 ::= "a"\nroot ::= r0'
DIES = (sys.executable, "-c", "import sys\nsys.stdin.buffer.readline()")


def choice(text: str) -> ResponseFormat:
    """Return a format of one text."""
    return ResponseFormat(FormatKind.CHOICE, choices=(text,))


def test_a_choice_is_one_of_its_texts() -> None:
    """Signs mean themselves, and one text may begin another."""
    constraint = compile_format(FormatKind.CHOICE, choices=("yes", "yes.*", "ja\n", "è\\"))

    assert [t for t in ("yes", "yes.*", "ja\n", "è\\") if not accepts(constraint, t)] == []
    assert [t for t in ("", "ye", "yes.", "yesss", "ja") if accepts(constraint, t)] == []


def test_any_object_is_an_object() -> None:
    """The kind without a schema takes every object and nothing else."""
    constraint = compile_format(FormatKind.JSON_OBJECT)

    assert accepts(constraint, '{"a": [1, {"b": null}], "c": "é\\n"}')
    assert not accepts(constraint, "[]")


def test_kept_formats_are_bounded_by_count() -> None:
    """The format used longest ago goes when there are too many."""
    constraints = Constraints(demo_tokenizer(), demo_tokenizer().vocab_size)
    first = constraints.compile(choice("first"))
    for index in range(config.CONSTRAINTS_KEPT_MAX - 1):
        constraints.compile(choice(f"x{index}"))
    assert constraints.find_kept(choice("first")) is first
    constraints.compile(choice("one more"))

    assert constraints.find_kept(choice("first")) is first, "it was used since"
    assert constraints.find_kept(choice("x0")) is None


def test_kept_formats_are_bounded_by_their_texts() -> None:
    """Two formats of half the bound and more are not both kept."""
    constraints = Constraints(demo_tokenizer(), demo_tokenizer().vocab_size)
    padding = " " * (config.CONSTRAINTS_KEPT_CHARS_MAX // 2)
    large, other = (
        ResponseFormat(FormatKind.JSON_SCHEMA, f'{{"const": {n}}}{padding}') for n in (1, 2)
    )
    constraints.compile(large)
    constraints.compile(large)
    assert constraints.find_kept(large) is not None
    constraints.compile(other)

    assert constraints.find_kept(large) is None
    assert constraints.find_kept(other) is not None


def test_how_calls_are_noticed_is_learnt_once() -> None:
    """By whoever can wait for it; to watch for calls takes nothing more then."""
    constraints = demo_constraints()
    known = constraints.learn_spellings()
    grammar = constraints.compile(ResponseFormat(FormatKind.REGEX, "a"))
    watched = constraints.watch(grammar, Marks(b"<"), ends=True)
    assert (watched.pieces, watched.ids) == (known.pieces, known.ids)
    assert watched.pieces is known.pieces


def test_a_rest_leaves_no_format_kept() -> None:
    """What was compiled for streams to come is compiled anew; who has it goes on with it."""
    constraints = Constraints(demo_tokenizer(), demo_tokenizer().vocab_size)
    former = constraints.compile(choice("first"))
    constraints.rest()

    assert constraints.find_kept(choice("first")) is None
    assert accepts(former, "first")
    assert constraints.compile(choice("first")) is not former


def test_a_format_that_its_rows_have_filled_up_is_not_kept() -> None:
    """Rows share what they have met, which is bounded: beyond it each would be refused for ever."""
    limits = LLParserLimits(max_lexer_states=200)
    tokenizer = demo_tokenizer()
    constraints = Constraints(tokenizer, tokenizer.vocab_size, limits=lambda _: limits)
    wanted = ResponseFormat(FormatKind.REGEX, "(a|b)*a(a|b){400}")
    kept = constraints.compile(wanted)
    assert constraints.find_kept(wanted) is kept

    with pytest.raises(InvalidRequest, match="too many states"):
        follow(kept, tokenizer, "a" * 300)
    with pytest.raises(InvalidRequest, match="too many states"):
        follow(kept, tokenizer, "b" + "a" * 299)

    assert constraints.find_kept(wanted) is None
    follow(constraints.compile(wanted), tokenizer, "ab")


def follow(constraint: Constraint, tokenizer: Tokenizer, text: str) -> None:
    """Follow a text with a row of its own."""
    matcher = constraint.start()
    for token_id in tokenizer.encode(text, begin_text=False):
        assert matcher.try_accept(token_id)
    matcher.mask()


@pytest.mark.parametrize(
    ("kind", "text", "problem"),
    [
        (FormatKind.JSON_SCHEMA, '{"type": 3}', "#/type: a type's name"),
        (FormatKind.REGEX, "a(", "a group that is not closed, at character 2"),
        (FormatKind.EBNF_GRAMMAR, "root ::= a", "1:10: there is no rule 'a'"),
        (FormatKind.JSON_SCHEMA, '{"enum": []}', "#/enum: a list of at least one"),
        (FormatKind.EBNF_GRAMMAR, "root ::= root", "no text matches it"),
    ],
)  # fmt: skip
def test_a_bad_format_is_refused_by_its_field(kind: FormatKind, text: str, problem: str) -> None:
    """The field on the wire, and the place in it."""
    with pytest.raises(InvalidRequest) as caught:
        compile_format(kind, text)

    (violation,) = caught.value.violations
    assert violation.field == f"response_format.{kind.value}"
    assert violation.description.startswith(problem)


def test_reasons_are_the_users() -> None:
    """No grammar of ours, and no place in the library's own code."""
    assert reason("failed to compile JSON schema: no such thing\n<our grammar>") == "no such thing"
    assert reason("panic: assertion failed: a < b") == "takes more than the library can count"


def test_a_grammar_is_tried_out_before() -> None:
    """What goes beyond the library's bounds only further on is refused before it begins."""
    wide = {"type": "object", "properties": {f"a{i}": {} for i in range(600)}}
    trials = Pool(TRIAL)
    try:
        wanted = ResponseFormat(FormatKind.JSON_SCHEMA, json.dumps(wide))
        with pytest.raises(InvalidRequest, match="max is 2000"):
            demo_constraints().compile(wanted, trials)
        assert demo_constraints().compile(ResponseFormat(FormatKind.EBNF_GRAMMAR, DEEP), trials)
        assert demo_constraints().compile(choice("good"), trials)
        with pytest.raises(InvalidRequest):  # the same process tells of a bad grammar
            try_out(trials, "start: (", "response_format.ebnf_grammar")
        try_out(trials, 'start: "a"\n', "response_format.ebnf_grammar")
    finally:
        trials.close()


DOUBLES: Any = {"type": "integer"}
for _ in range(30):
    DOUBLES = {"properties": {"x": DOUBLES}, "anyOf": [{"required": ["x"]}, {"required": ["y"]}]}


@pytest.mark.parametrize(
    ("wanted", "is_tried"),
    [
        (choice("short"), False),
        (choice("long" * 1000), True),
        (ResponseFormat(FormatKind.JSON_OBJECT), False),
        (ResponseFormat(FormatKind.JSON_SCHEMA, '{"properties": {"a": {"enum": [1]}}}'), False),
        (ResponseFormat(FormatKind.JSON_SCHEMA, '{"minItems": 9999, "items": {}}'), True),
        (ResponseFormat(FormatKind.JSON_SCHEMA, '{"pattern": "a"}'), True),
        (ResponseFormat(FormatKind.JSON_SCHEMA, '{"items": {"$ref": "#"}}'), True),
        (ResponseFormat(FormatKind.JSON_SCHEMA, json.dumps(DOUBLES)), True),
        (ResponseFormat(FormatKind.REGEX, "a"), True),
        (ResponseFormat(FormatKind.EBNF_GRAMMAR, 'root ::= "a"'), True),
    ],
    ids=str,
)
def test_what_is_small_is_not_tried_out(wanted: ResponseFormat, *, is_tried: bool) -> None:
    """A short format whose cost grows with its size alone; all others are tried out."""
    sources: list[bytes] = []

    class Refusing(Pool):
        def ask(self, question: bytes, *, limit_s: float, stop: Stop | None = None) -> bytes:
            sources.append(question)
            return b"refused"

    with contextlib.suppress(InvalidRequest):
        demo_constraints().compile(wanted, Refusing(()))
    assert (len(sources) == 1) == is_tried


@pytest.mark.parametrize(
    ("command", "limit_s", "problem"),
    [(HANGS, 0.2, "not compiled within 0.2 s"), (DIES, 60, "takes more memory, or a deeper stack")],
)
def test_a_trial_that_does_not_end_well_is_a_refusal(
    command: tuple[str, ...], limit_s: float, problem: str
) -> None:
    """A process that hangs is killed, one that died is told apart; the next one is fresh."""
    trials = Pool(command)
    try:
        for _ in range(2):
            with pytest.raises(InvalidRequest, match=problem):
                try_out(trials, 'start: "a"', "response_format.ebnf_grammar", limit_s=limit_s)
    finally:
        trials.close()


def test_trials_that_are_closed_end_and_try_nothing_more() -> None:
    """A trial under way is told as the server's stop, not as the grammar's fault."""
    trials = Pool(HANGS)
    error_types: list[type[BaseException]] = []

    def run() -> None:
        try:
            try_out(trials, 'start: "a"', "response_format.ebnf_grammar", limit_s=60)
        except (InvalidRequest, ShuttingDown) as error:
            error_types.append(type(error))

    thread = threading.Thread(target=run)
    thread.start()
    while not trials._children:
        thread.join(0)
    trials.close()
    thread.join()
    run()
    assert error_types == [ShuttingDown] * 2


def test_what_needs_too_much_memory_ends_its_trial_alone() -> None:
    """A process bounds its own memory: thirty ambiguous patterns on one text are too much."""
    patterns = [{"pattern": f"(a|b)*a(a|b){{{i}}}c"} for i in range(20, 60)]
    wanted = ResponseFormat(
        FormatKind.JSON_SCHEMA, json.dumps({"type": "string", "allOf": patterns})
    )
    trials = Pool(TRIAL)
    try:
        with pytest.raises(InvalidRequest, match=r"takes more memory|not compiled within"):
            demo_constraints().compile(wanted, trials)
    finally:
        trials.close()


@pytest.mark.parametrize(
    "text",
    [
        '{"const": ' + "1" * 5000 + "}",
        r'{"const": "\ud800"}',
        r'{"type": "object", "properties": {"\udc00": {"type": "foo"}}}',
    ],
    ids=["digits", "value", "name"],
)
def test_what_no_text_holds_is_refused_by_its_field(text: str) -> None:
    """An integer too long to read, or half a surrogate pair, is told the client as its error."""
    with pytest.raises(InvalidRequest) as caught:
        _source_of(ResponseFormat(FormatKind.JSON_SCHEMA, text))
    assert "response_format.json_schema" in to_status(caught.value).message
