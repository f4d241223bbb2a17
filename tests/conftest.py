"""What every test run has: the rule about skips, and the `soak` mark for the long tests."""

from __future__ import annotations

import gc
import signal
from collections.abc import Generator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.support.effort import SAME_EACH_TIME, examples

SOAK_FOLDER = Path(__file__).resolve().parent / "soak"

# How long an example takes, or to draw it, is for the whole test's timeout to judge.
settings.register_profile(
    "mlxd",
    derandomize=SAME_EACH_TIME,
    deadline=None,
    max_examples=examples(100),
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("mlxd")

pytest_plugins = [
    "tests.plugins.backend", "tests.plugins.leaks", "tests.plugins.logs",
    "tests.plugins.neighbours", "tests.plugins.skips",
]  # fmt: skip


def pytest_configure() -> None:
    """Let Ctrl-C work in the processes that tests start, as from a terminal.

    A shell has what it starts with `&` ignore that signal, and children would inherit it.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark whatever lies in tests/soak, so that no file there can forget to."""
    for item in items:
        if SOAK_FOLDER in item.path.parents:
            item.add_marker(pytest.mark.soak)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Look for no garbage while importing and collecting, and never at what that has made.

    It is there to stay, and every collection would look at all of it.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()
