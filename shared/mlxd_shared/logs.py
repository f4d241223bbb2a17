"""Structured logs: one JSON object a line, or colours for a person at a terminal.

The context (request id, model) is bound per task with `structlog.contextvars`. Prompts and outputs
are never logged, unless `configure` was told so and the caller checks `content_logged`.
"""

from __future__ import annotations

import logging
import sys
from typing import Literal, TextIO

import structlog

LogFormat = Literal["auto", "json", "console"]
LEVELS = {name: logging.getLevelNamesMapping()[name.upper()] for name in
          ("debug", "info", "warning", "error")}  # fmt: skip


def configure(*, level: str = "info", fmt: LogFormat = "auto", stream: TextIO = sys.stderr) -> None:
    """Set up structlog for this process; call once, before the first log line.

    Raises:
        ValueError: `level` is not one of LEVELS.
    """
    if level not in LEVELS:
        message = f"log level {level!r} is not one of {', '.join(LEVELS)}"
        raise ValueError(message)
    console = fmt == "console" or (fmt == "auto" and stream.isatty())
    renderer: structlog.typing.Processor = (
        structlog.dev.ConsoleRenderer(
            colors=stream.isatty(),
            # The default shows local variables where it can, and those hold prompts.
            exception_formatter=structlog.dev.plain_traceback,
        )
        if console
        else structlog.processors.JSONRenderer()
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.StackInfoRenderer(),
            *([] if console else [structlog.processors.format_exc_info]),
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(LEVELS[level]),
        logger_factory=structlog.WriteLoggerFactory(file=stream),
        cache_logger_on_first_use=False,
    )


def get_logger(component: str) -> structlog.typing.FilteringBoundLogger:
    """Return a logger that names its component on every line."""
    logger: structlog.typing.FilteringBoundLogger = structlog.get_logger(component=component)
    return logger
