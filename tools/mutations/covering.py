"""A pytest plugin that records which test runs which line, and how long each test takes.

coverage.py is already measuring when it loads. Programs that a test starts inherit the variable
TEST, which their own measuring takes as the context: their lines count for that test as well.
"""

from __future__ import annotations

import json
import os
from collections.abc import Generator
from pathlib import Path

import coverage
import pytest

TEST = "MLXD_MUTATIONS_TEST"
REPORT = "MLXD_MUTATIONS_REPORT"


class Covering:
    """Names each test as the context of what runs during it, and notes how it went."""

    def __init__(self, measuring: coverage.Coverage, report: Path) -> None:
        self._measuring = measuring
        self._report = report
        self._took_s: dict[str, float] = {}
        self._outcomes: dict[str, set[str]] = {}

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """Count the lines of this test's set-up, call and end for it."""
        os.environ[TEST] = item.nodeid
        self._measuring.switch_context(item.nodeid)
        return (yield)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add up the time of the three parts of a test, and keep how each ended."""
        name = report.nodeid
        self._took_s[name] = self._took_s.get(name, 0.0) + report.duration
        self._outcomes.setdefault(name, set()).add(report.outcome)

    def pytest_sessionfinish(self) -> None:
        """Write the time of each test that passed; no other can tell a mutant from the tree."""
        passed = {
            name: round(took_s, 3)
            for name, took_s in self._took_s.items()
            if self._outcomes[name] == {"passed"}
        }
        self._report.write_text(json.dumps(passed, indent=0, sort_keys=True), encoding="utf-8")


def pytest_configure(config: pytest.Config) -> None:
    """Start recording where a run of the mutations asks for it and coverage.py measures."""
    measuring = coverage.Coverage.current()
    if measuring is not None and REPORT in os.environ:
        config.pluginmanager.register(Covering(measuring, Path(os.environ[REPORT])))
