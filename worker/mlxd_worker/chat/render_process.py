"""The process in which chat templates are rendered, so that none can hold up or fill the worker.

A template is a program. What it computes cannot be bounded by looking at it: loops in loops, texts
that double. So it runs here, in a process that limits its memory and that is killed when it is
late (`killable`). Asked and answered is JSON, of a job (`Job`) and of what `answer_job` returns.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import jinja2

from mlxd_shared import config
from mlxd_worker.chat.environment import Refusal, TooLong
from mlxd_worker.chat.rendering import NotContinued, TemplateFault, render_chat
from mlxd_worker.chat.trouble import Trouble
from mlxd_worker.killable.process import serve


def answer_job(job: dict[str, Any]) -> dict[str, Any]:
    """Return the text of a job, or what keeps it from having one: a `Trouble` by its fields."""
    try:
        text = render_chat(**job, chars_max=config.PROMPT_CHARS_MAX)
        text.encode()  # half a character, which no tokenizer takes
    except Exception as error:  # noqa: BLE001 - a template's own: any class there is
        return asdict(_judge(error))
    return {"text": text}


def _judge(error: Exception) -> Trouble:
    """Return what kind of trouble a rendering met, and what to say about it."""
    match error:
        case jinja2.TemplateSyntaxError():
            return Trouble("syntax", str(error.message), error.lineno)
        case Refusal():
            return Trouble("refused", str(error.message))
        case TemplateFault(problem, line, field):
            return Trouble("fails", problem, line, field)
    kinds = (trouble for kind, trouble in _TROUBLES.items() if isinstance(error, kind))
    return next(kinds, Trouble("fails", f"{type(error).__name__}: {error}"))


_TROUBLES = {
    NotContinued: Trouble("continue", "the template leaves its content out"),
    TooLong: Trouble("bound", f"above {config.PROMPT_CHARS_MAX} characters"),
    MemoryError: Trouble("bound", "takes more memory than there is for it"),
    RecursionError: Trouble("bound", "nested too deep"),
    UnicodeError: Trouble("fails", "it writes half a character"),
}


def main() -> None:
    """Serve standard input, within bounds of its own."""
    serve(
        lambda job: json.dumps(answer_job(json.loads(job))).encode(),
        limit_s=config.CHAT_RENDER_S,
        memory_nbytes_max=config.CHAT_RENDER_BYTES_MAX,
    )


if __name__ == "__main__":
    main()
