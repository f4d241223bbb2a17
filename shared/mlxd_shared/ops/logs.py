"""Structured logs: one JSON object a line, or colours for a person at a terminal.

The context (request id, model) is bound per task with `structlog.contextvars`. Prompts and outputs
are logged by nobody but the controller's `Transcript`, where an operator asked for it.

A log that nobody reads any more never stops its writer: a worker whose controller was killed has a
broken pipe for a log, and must still end in good order. Nor does a log on a full disk.

structlog is imported by who sets the log up or writes a line: a client has a logger or two behind
it, mostly writes none, and would begin a fifth later (structlog imports all that can render one).
"""

from __future__ import annotations

import importlib
import io
import logging
import os
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, TextIO, cast

from mlxd_shared.ops.terminal import escape, escape_line

if TYPE_CHECKING:
    import structlog

RICH = "rich"
LogFormat = Literal["auto", "json", "console"]
LEVELS = {name: logging.getLevelNamesMapping()[name.upper()] for name in
          ("debug", "info", "warning", "error")}  # fmt: skip


class LastingStream(io.TextIOBase):
    """Writes to a stream; once its pipe has no reader, everything goes to the null device."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write all of `text`."""
        try:
            self._stream.write(text)
        except BrokenPipeError:
            self._let_go()
        except OSError:  # a full disk: the line is lost, and the next one may have room
            pass
        return len(text)

    def flush(self) -> None:
        """Write what is buffered."""
        try:
            self._stream.flush()
        except BrokenPipeError:
            self._let_go()
        except OSError:
            pass

    def _let_go(self) -> None:
        # In place, so that what else holds this descriptor does not meet the broken pipe either.
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, self._stream.fileno())
        os.close(null)


def configure(*, level: str = "info", fmt: LogFormat = "auto", stream: TextIO = sys.stderr) -> None:
    """Set up structlog for this process; call once, before the first log line.

    Raises:
        ValueError: `level` is not one of LEVELS.
    """
    _import_without_rich()
    import structlog  # noqa: PLC0415 - see above

    if level not in LEVELS:
        raise ValueError(f"log level {level!r} is not one of {', '.join(LEVELS)}")
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
            _harmless if console else structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(LEVELS[level]),
        logger_factory=structlog.WriteLoggerFactory(file=cast("TextIO", LastingStream(stream))),
        cache_logger_on_first_use=False,
    )


def _import_without_rich() -> None:
    """Import structlog as where rich is not installed: it renders nothing here.

    structlog imports rich wherever it can, and that takes a fifth of a worker's start.
    """
    modules = cast("dict[str, ModuleType | None]", sys.modules)
    before = modules.get(RICH)
    modules[RICH] = None  # what the import system takes for absent
    try:
        importlib.import_module("structlog.dev")
    finally:
        modules.pop(RICH)
        if before is not None:
            modules[RICH] = before


def _harmless(
    logger: object,  # noqa: ARG001 - the signature is structlog's
    method: str,  # noqa: ARG001 - likewise
    event: structlog.typing.EventDict,
) -> structlog.typing.EventDict:
    """Keep texts of others, such as names in a model's files, from steering a terminal."""
    for name, value in event.items():
        if isinstance(value, str):
            lines = name in ("exception", "stack")
            event[name] = escape(value) if lines else escape_line(value)
    return event


def bind_to_log(**values: object) -> None:
    """Have each line that this task writes from now on say these as well."""
    import structlog  # noqa: PLC0415 - see above

    structlog.contextvars.bind_contextvars(**values)


class _Logger:
    """Stands for structlog's logger of a component, which is made for each line."""

    def __init__(self, component: str) -> None:
        self._component = component

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - a method of structlog's
        import structlog  # noqa: PLC0415 - see above

        return getattr(structlog.get_logger(component=self._component), name)


def get_logger(component: str) -> structlog.typing.FilteringBoundLogger:
    """Return a logger that names its component on every line."""
    return cast("structlog.typing.FilteringBoundLogger", _Logger(component))
