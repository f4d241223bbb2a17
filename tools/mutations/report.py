"""What a run has come to: kept line by line as it goes, and told at the end."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mutations.trials import Outcome, Verdict

SHARE_MIN = 0.85
"""The part of all mutants that the tests of their own room are to see."""


def record(outcome: Outcome) -> dict[str, Any]:
    """Return an outcome as one line of the results says it."""
    mutant = outcome.mutant
    return {
        "source": mutant.source,
        "line": mutant.line,
        "verdict": outcome.verdict.value,
        "killer": outcome.killer,
        "tests": outcome.tests,
        "took_s": outcome.took_s,
        "diff": mutant.diff,
    }


def key(source: str, line: int, diff: str) -> tuple[str, int, str]:
    """Return what tells two mutants apart."""
    return source, line, diff


class Results:
    """A file of outcomes, one a line, to which a run that is taken up again adds."""

    def __init__(self, path: Path) -> None:
        """Read what an earlier run left; a line that it was cut off in is dropped."""
        self._path = path
        self._records: dict[tuple[str, int, str], dict[str, Any]] = {}
        for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
            try:
                each = json.loads(line)
            except json.JSONDecodeError:
                continue
            self._records[key(each["source"], each["line"], each["diff"])] = each

    def add(self, outcome: Outcome) -> None:
        """Keep an outcome, in memory and in the file."""
        each = record(outcome)
        self._records[key(each["source"], each["line"], each["diff"])] = each
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(each) + "\n")

    def known_keys(self) -> set[tuple[str, int, str]]:
        """Return the keys of the mutants whose outcome is known."""
        return set(self._records)

    def of(self, wanted: Iterable[tuple[str, int, str]]) -> list[Mapping[str, Any]]:
        """Return the outcomes of some mutants, as far as they are known."""
        return [self._records[each] for each in wanted if each in self._records]


def share(records: Iterable[Mapping[str, Any]]) -> float:
    """Return the part of some mutants that the tests saw; 1 of none.

    Those that the type checker refuses are not counted.
    """
    verdicts = [Verdict(each["verdict"]) for each in records]
    dead = [verdict.dead for verdict in verdicts if verdict is not Verdict.REFUSED]
    return sum(dead) / len(dead) if dead else 1.0


def words(records: Sequence[Mapping[str, Any]], *, seed: int) -> str:
    """Tell the whole run: the survivors with what was changed, then the figures."""
    lines = []
    for each in records:
        if not Verdict(each["verdict"]).dead:
            lines += [f"{each['source']}:{each['line']}: {each['verdict']}", each["diff"], ""]
    counts = Counter(each["verdict"] for each in records)
    counted = ", ".join(f"{counts[verdict.value]} {verdict.value}" for verdict in Verdict)
    part = share(records)
    lines.append(
        f"{len(records)} mutants, seed {seed}: {counted}; {part:.1%} seen by their own room"
    )
    return "\n".join(lines)
