"""All real schemas through the compiler: what each of them made, judged, and added up.

Each schema is looked at on its own, by a process of its own kind, so they may be spread over many.
"""

from __future__ import annotations

import functools
import json
import lzma
import random
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from mlxd_shared.domain.errors import InvalidRequest
from mlxd_shared.domain.formats import FormatKind, ResponseFormat
from mlxd_worker.constraints.compiler import TRIAL
from mlxd_worker.engine.masks.constraint import Constraint
from mlxd_worker.killable.pool import Pool
from tests.support.constrained import (
    DEMO,
    accepts,
    accepts_ordered,
    demo_constraints,
    demo_tokenizer,
)
from tests.support.json_mutants import mutant
from tests.support.schema_walks import Judge, Walker

DATA: Final = ("jsonschema", "maskbench_small.jsonl.xz")
LEFT_OUT: Final = {"Github_medium---o74461"}
"""Schemas with a valid instance that is left out: 75.0, where multiples of 0.25 are wanted."""
INSTANCES_CHANGED: Final = 2
UNTOLD: Final = "the judge cannot tell"


@dataclass(frozen=True, slots=True)
class Instance:
    """What became of one instance of a schema."""

    label: bool
    """What the data set says."""
    judged: bool | None
    """What the judge says; None where it cannot tell."""
    as_written: bool
    """Whether it was accepted, token by token."""
    ordered: bool
    """Whether it was accepted with its members in some order, the schema's."""


@dataclass(slots=True)
class Outcome:
    """What became of one schema."""

    index: int
    name: str
    compile_s: float = 0.0
    refused: str = ""
    """Why, and where; empty where it compiled."""
    tests: list[Instance] = field(default_factory=list)
    walks: Counter[str] = field(default_factory=Counter)
    invalid: list[str] = field(default_factory=list)
    """Complete outputs, and accepted mutants, that the judge finds wrong."""
    mutants: Counter[str] = field(default_factory=Counter)
    """What the judge and the constraint said of instances with a change."""
    alone_compiled: bool = False
    """Whether the library alone compiles the schema as it is."""
    alone_right: bool = False
    """Whether it then accepts and rejects each instance as it is labelled."""

    @property
    def right(self) -> bool:
        """Whether the schema compiled, and each instance was judged as it is labelled."""
        return not self.refused and all(test.label == test.ordered for test in self.tests)


def schemas(path: Path, *, step: int = 1, start: int = 0) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield every `step`-th schema with its place in the file."""
    with lzma.open(path, "rt", encoding="utf-8") as lines:
        for index, line in enumerate(lines):
            if index % step == start:
                yield index, json.loads(line)


def shard(path: Path, start: int, step: int, walks: int) -> list[Outcome]:
    """Look at every `step`-th schema, beginning with `start`."""
    trials = Pool(TRIAL)
    try:
        return [
            look(index, line, trials, walks)
            for index, line in schemas(path, step=step, start=start)
        ]
    finally:
        trials.close()


def look(index: int, line: dict[str, Any], trials: Pool, walks: int) -> Outcome:
    """Compile one schema as the worker does, give it its instances, and walk through its masks."""
    outcome = Outcome(index, line["id"])
    text = json.dumps(line["schema"], ensure_ascii=False)
    _look_at_library_alone(outcome, text, line["tests"])
    begun = time.perf_counter()
    try:
        constraint = demo_constraints().compile(
            ResponseFormat(FormatKind.JSON_SCHEMA, text), trials
        )
    except InvalidRequest as error:
        (violation,) = error.violations
        outcome.refused = f"{violation.field}: {violation.description}"
        return outcome
    finally:
        outcome.compile_s = time.perf_counter() - begun
    judge = Judge(line["schema"])
    for test in line["tests"]:
        data = json.dumps(test["data"], ensure_ascii=False)
        judged, as_written = _judge(judge, data.encode()), accepts(constraint, data)
        ordered = as_written or (
            (test["valid"] or judged is True) and accepts_ordered(constraint, test["data"])
        )
        outcome.tests.append(Instance(test["valid"], judged, as_written, ordered))
    rng = random.Random(index)
    for test in line["tests"][:INSTANCES_CHANGED]:
        for _ in range(walks):
            _look_at_mutant(outcome, judge, constraint, mutant(test["data"], rng))
    for number in range(walks):
        output = walker().walk(constraint, random.Random(index * 100 + number))
        if output is None:
            outcome.walks["too long"] += 1
            continue
        outcome.walks["complete"] += 1
        verdict = _judge(judge, output)
        if verdict is None:
            outcome.walks[UNTOLD] += 1
        elif not verdict:
            outcome.invalid.append(f"{judge.problems(output)[:2]} {output[:300]!r}")
    return outcome


def _look_at_mutant(outcome: Outcome, judge: Judge, constraint: Constraint, value: Any) -> None:
    text = json.dumps(value, ensure_ascii=False)
    verdict, accepted = _judge(judge, text.encode()), accepts(constraint, text)
    accepted = accepted or (verdict is True and accepts_ordered(constraint, value))
    said = {True: "valid", False: "invalid", None: UNTOLD}[verdict]
    outcome.mutants[f"{said}, {'accepted' if accepted else 'rejected'}"] += 1
    if accepted and verdict is False:
        outcome.invalid.append(f"mutant {judge.problems(text.encode())[:2]} {text[:300]}")


def _judge(judge: Judge, text: bytes) -> bool | None:
    """Return what the judge says; None where it comes to no end of its own."""
    try:
        return not judge.problems(text)
    except (RecursionError, ArithmeticError, LookupError, ValueError):
        return None


@functools.cache
def walker() -> Walker:
    """Return a walker over the demo model's tokens."""
    return Walker.of(demo_tokenizer())


@functools.cache
def _library() -> LLTokenizer:
    return LLTokenizer((DEMO / "tokenizer.json").read_text(encoding="utf-8"))


def _look_at_library_alone(outcome: Outcome, schema: str, tests: list[dict[str, Any]]) -> None:
    """Give the library the schema as it is, and the instances."""
    try:
        source = LLMatcher.grammar_from_json_schema(schema)
        matcher = LLMatcher(_library(), source, log_level=0)
    except ValueError:
        return
    outcome.alone_compiled = not matcher.is_error()
    outcome.alone_right = outcome.alone_compiled and all(
        test["valid"] == _complete(matcher.deep_copy(), test["data"]) for test in tests
    )


def _complete(matcher: LLMatcher, value: Any) -> bool:
    text = json.dumps(value, ensure_ascii=False)
    ids = demo_tokenizer().encode(text, begin_text=False)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def figures(outcomes: Iterable[Outcome]) -> dict[str, Any]:
    """Add up what became of all schemas."""
    all_of_them = sorted(outcomes, key=lambda outcome: outcome.index)
    compiled = [outcome for outcome in all_of_them if not outcome.refused]
    tests = [test for outcome in compiled for test in outcome.tests]
    walks: Counter[str] = sum((outcome.walks for outcome in compiled), Counter())
    seconds = [outcome.compile_s for outcome in compiled]
    return {
        "schemas": len(all_of_them),
        "compiled": len(compiled),
        "right": sum(outcome.right for outcome in compiled),
        "alone_compiled": sum(outcome.alone_compiled for outcome in all_of_them),
        "alone_right": sum(outcome.alone_right for outcome in all_of_them),
        "lost_to_it_alone": [f.name for f in all_of_them if f.alone_right and not f.right],
        "instances": _instances(tests),
        "walks": dict(walks),
        "mutants": dict(sum((outcome.mutants for outcome in compiled), Counter[str]())),
        "invalid_outputs": sum(len(outcome.invalid) for outcome in compiled),
        "compile_ms": {
            "p50": round(float(np.percentile(seconds, 50)) * 1e3, 1),
            "p99": round(float(np.percentile(seconds, 99)) * 1e3, 1),
            "max": round(max(seconds) * 1e3, 1),
        },
        "refused": dict(
            Counter(
                _class(outcome.refused) for outcome in all_of_them if outcome.refused
            ).most_common(40)
        ),
    }


def _instances(tests: list[Instance]) -> dict[str, int]:
    """Count instances by the data set's labels, and where the judge sees them otherwise."""
    valid = [test for test in tests if test.label]
    invalid = [test for test in tests if not test.label]
    return {
        "valid": len(valid),
        "valid_accepted_as_written": sum(test.as_written for test in valid),
        "valid_accepted_ordered": sum(test.ordered for test in valid),
        "valid_for_the_judge_too": sum(test.judged is True for test in valid),
        "invalid": len(invalid),
        "invalid_rejected": sum(not test.as_written for test in invalid),
        "invalid_but_valid_for_the_judge": sum(test.judged is True for test in invalid),
        "of_those_accepted": sum(test.judged is True and test.ordered for test in invalid),
        "accepted_but_invalid_for_the_judge": sum(
            test.judged is False and test.ordered for test in tests
        ),
    }


def _class(refusal: str) -> str:
    """Return what a refusal is about, without its place."""
    _, _, rest = refusal.partition(": ")
    place, mark, problem = rest.partition(": ")
    return f"{place.rpartition('/')[2]}: {problem[:60]}" if mark and "#" in place else rest[:60]
