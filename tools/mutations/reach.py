"""Which tests reach which lines: every test of the rooms is run once under coverage.py.

The tests run in shards, each of which is kept when it is done, so that a run which was interrupted
goes on where it stopped. A test that fails under measurement is left out: it tells nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import coverage

from mutations.copies import PACKAGE_FOLDERS, Copy
from mutations.covering import REPORT, TEST
from mutations.rooms import test_files
from mutations.running import run

FILES_IN_SHARD = 8
SHARD_LIMIT_S = 1800.0

SETTINGS = """\
[run]
parallel = True
core = ctrace
sigterm = True
context = ${{{test}-}}
data_file = {data}
source =
{sources}
disable_warnings = no-data-collected, module-not-imported, module-not-measured, couldnt-parse
"""
"""Programs that tests start read this again, so that their context is the test of that moment."""


@dataclass(slots=True)
class Reach:
    """The tests that reach each line, as measured, and how long each takes.

    Source files are named from the root of the tree.
    """

    took_s: Mapping[str, float]
    data: Sequence[coverage.CoverageData]
    roots: Sequence[str]
    _lines: dict[str, dict[int, set[str]]] = field(default_factory=dict)

    def lines_of(self, source: str) -> Mapping[int, set[str]]:
        """Return the tests that run each line of a source file, by line."""
        if source not in self._lines:
            lines: dict[int, set[str]] = {}
            for data, root in zip(self.data, self.roots, strict=True):
                for line, tests in data.contexts_by_lineno(f"{root}/{source}").items():
                    lines.setdefault(line, set()).update(t for t in tests if t in self.took_s)
            self._lines[source] = lines
        return self._lines[source]

    def tests_of(self, source: str, lines: range | None = None) -> set[str]:
        """Return the tests that run any of some lines of a source file, or any of it."""
        reached = self.lines_of(source)
        wanted = reached if lines is None else lines
        return {test for line in wanted for test in reached.get(line, ())}


def shards_of(root: Path) -> list[list[str]]:
    """Cut the test files into shards: each takes one file of every part of the tree."""
    files = test_files(root)
    count = max(1, -(-len(files) // FILES_IN_SHARD))
    return [files[index::count] for index in range(count)]


def measure(copy: Copy, files: Sequence[str], place: Path) -> None:
    """Run one shard under coverage.py and keep what it shows in the folder `place`.

    Does nothing where that has been done.
    """
    report, settings = place / "tests.json", place / "settings.ini"
    if report.is_file():
        return
    place.mkdir(parents=True, exist_ok=True)
    folders = [copy.root / folder for folder in PACKAGE_FOLDERS if (copy.root / folder).is_dir()]
    sources = "\n".join(f"  {folder}" for folder in folders)
    text = SETTINGS.format(test=TEST, data=place / "part", sources=sources)
    settings.write_text(text, encoding="utf-8")
    (place / "root").write_text(str(copy.root), encoding="utf-8")
    command = [str(copy.python), "-m", "coverage", "run", f"--rcfile={settings}", "-m", "pytest"]
    options = ["-q", "-p", "mutations.covering", "-p", "no:cacheprovider", *files]
    unfinished = report.with_suffix(".part")
    environment = {
        **copy.environment(),
        REPORT: str(unfinished),
        "COVERAGE_PROCESS_START": str(settings),
    }
    run([*command, *options], cwd=copy.root, environment=environment, limit_s=SHARD_LIMIT_S)
    parts = [str(path) for path in place.glob("part.*")]
    whole = coverage.CoverageData(str(place / "lines.data"))
    for part in parts:
        data = coverage.CoverageData(part)
        data.read()
        whole.update(data)
        Path(part).unlink()
    if not unfinished.is_file():
        unfinished.write_text("{}", encoding="utf-8")
    unfinished.rename(report)


def read_reach(places: Sequence[Path]) -> Reach:
    """Read what the shards in the folders `places` have shown."""
    took_s: dict[str, float] = {}
    data, roots = [], []
    for place in places:
        took_s |= json.loads((place / "tests.json").read_text(encoding="utf-8"))
        part = coverage.CoverageData(str(place / "lines.data"))
        part.read()
        data.append(part)
        roots.append((place / "root").read_text(encoding="utf-8"))
    return Reach(took_s, data, roots)
