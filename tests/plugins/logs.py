"""What tests log looks as structlog has it by default, but for tracebacks, which are plain."""

from __future__ import annotations

import structlog


def pytest_configure() -> None:
    """Have the logs of this process's tests written so."""
    set_default_logs()


def set_default_logs() -> None:
    """Forget what a test configured, and write logs so again."""
    structlog.reset_defaults()
    *others, _ = structlog.get_config()["processors"]
    plain = structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)
    structlog.configure(processors=[*others, plain])
