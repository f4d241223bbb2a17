"""In CI a skipped test fails unless tests/allowed_skips.txt lists it with a reason.

A skip that nobody reads is a test that nobody runs. The rule is on where the environment variable
CI is set; on a developer's machine a test may skip for want of a tool, and says so. A test that is
expected to fail (xfail) ran, so it is no skip. A whole module that skips counts as one. An entry
may be for one platform, as Python names it; elsewhere it allows nothing.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Generator, Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest

LIST = Path(__file__).resolve().parent.parent / "allowed_skips.txt"
SEPARATOR = " | "
FOR_PLATFORM = re.compile(r"\[([a-z0-9]+)\]\s*")


@dataclass(frozen=True, slots=True)
class AllowedSkip:
    """A node id in which `*` stands for anything, and why it may skip."""

    pattern: str
    reason: str

    def covers(self, nodeid: str) -> bool:
        """Tell whether this entry is about `nodeid`; brackets in it are only brackets."""
        parts = (re.escape(part) for part in self.pattern.split("*"))
        return re.fullmatch(".*".join(parts), nodeid) is not None


def parse_allowed(lines: Iterable[str], *, platform: str = sys.platform) -> tuple[AllowedSkip, ...]:
    """Read the list as it is for a platform.

    Raises pytest.UsageError for a line without a pattern or a reason.
    """
    allowed = []
    for number, line in enumerate(lines, start=1):
        if not line.strip() or line.startswith("#"):
            continue
        where, _, reason = (part.strip() for part in line.partition(SEPARATOR))
        only = FOR_PLATFORM.match(where)
        pattern = where[only.end() :] if only else where
        if not pattern or not reason:
            raise pytest.UsageError(f"line {number}: want `node id{SEPARATOR}reason`, not {line!r}")
        if only is None or only[1] == platform:
            allowed.append(AllowedSkip(pattern, reason))
    return tuple(allowed)


class SkipsAreFailures:
    """Turns the report of an unlisted skip into a failure that names the list."""

    def __init__(self, allowed: tuple[AllowedSkip, ...], list_path: Path) -> None:
        self._allowed = allowed
        self._list_path = list_path

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self,
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Judge the report of one phase of one test."""
        report = yield
        if report.skipped and "wasxfail" not in vars(report) and not self._covers(report.nodeid):
            report.outcome = "failed"
            report.longrepr = self._complaint(report.nodeid, str(report.longrepr))
        return report

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(
        self,
    ) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
        """Judge the report of a module, which may have skipped itself as a whole."""
        report = yield
        if report.skipped and not self._covers(report.nodeid):
            report.outcome = "failed"
            report.longrepr = self._complaint(report.nodeid, str(report.longrepr))
        return report

    def _covers(self, nodeid: str) -> bool:
        return any(entry.covers(nodeid) for entry in self._allowed)

    def _complaint(self, nodeid: str, reason: str) -> str:
        return f"skipped, and {self._list_path.name} does not list it: {nodeid}\n{reason}"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let a run name another list, as the test of this plugin does."""
    parser.addoption("--allowed-skips", type=Path, default=LIST, help="list of skips allowed in CI")


def pytest_configure(config: pytest.Config) -> None:
    """Switch the rule on in CI."""
    if not os.environ.get("CI"):
        return
    path: Path = config.getoption("--allowed-skips")
    allowed = parse_allowed(path.read_text(encoding="utf-8").splitlines())
    config.pluginmanager.register(SkipsAreFailures(allowed, path), "skips-are-failures")
