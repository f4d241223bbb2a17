"""What every test run has: the rule about skips, and the `soak` mark for the long tests."""

from __future__ import annotations

from pathlib import Path

import pytest

SOAK_FOLDER = Path(__file__).resolve().parent / "soak"

pytest_plugins = ["tests.plugins.backend", "tests.plugins.skips"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark whatever lies in tests/soak, so that no file there can forget to."""
    for item in items:
        if SOAK_FOLDER in item.path.parents:
            item.add_marker(pytest.mark.soak)
